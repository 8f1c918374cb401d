#!/bin/sh
# nvrx.sh FOLDER TORCH VERSION: makes a Debian in FOLDER with nvidia-resiliency-ext in /venv, whose
# wheels from 0.5 on want a newer glibc than Debian 12 has, and Python 3.12 or 3.14 (Debian 13 has
# 3.13). Needs root and debootstrap; 5 GB.
set -eu
root=$1 torch=$2 version=$3
cas=${SSL_CERT_FILE:-/etc/ssl/certs/ca-certificates.crt}
rm -rf "$root"
# The debootstrap of an older Debian has no script for a newer one; all are that of sid.
debootstrap --variant=minbase --include=python3-venv,ca-certificates forky "$root" \
	http://deb.debian.org/debian /usr/share/debootstrap/scripts/sid >"$root.log" 2>&1 ||
	{ tail -5 "$root.log" >&2; exit 1; }
rm "$root.log"
cp "$cas" "$root/etc/ssl/certs/ca-certificates.crt"
cp /etc/resolv.conf /etc/hosts "$root/etc/"
chroot "$root" python3 -m venv /venv
unset PIP_FIND_LINKS
export PIP_CERT=/etc/ssl/certs/ca-certificates.crt
chroot "$root" /venv/bin/pip install --quiet --no-cache-dir "$torch" "nvidia-resiliency-ext==$version"
