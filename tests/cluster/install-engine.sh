#!/bin/sh
# Install a container engine where there is none; the tests start it if none answers.
set -eu
if command -v docker >/dev/null; then
    if command -v dockerd >/dev/null || docker info >/dev/null 2>&1; then exit 0; fi
fi
if [ "$(id -u)" -ne 0 ] || ! command -v apt-get >/dev/null; then
    echo "make test needs a container engine: install Docker, or make test-without-containers." >&2
    exit 1
fi
echo "installing a container engine for the tests ..."
export DEBIAN_FRONTEND=noninteractive
apt-get update -qq
# debootstrap makes a base image where none can be pulled.
apt-get install -y -qq --no-install-recommends --no-remove docker.io debootstrap iptables >/dev/null
