#!/bin/sh
# Install a container engine for the tests where none answers and none is there. They start it.
command -v docker >/dev/null && docker info >/dev/null 2>&1 && exit 0
command -v docker >/dev/null && command -v dockerd >/dev/null && command -v debootstrap >/dev/null && exit 0
if [ "$(id -u)" -ne 0 ] || ! command -v apt-get >/dev/null; then
    echo "The tests need a container engine: start Docker, or leave them out with make test-fast." >&2
    exit 1
fi
echo "installing a container engine for the tests ..."
export DEBIAN_FRONTEND=noninteractive
apt-get update -qq
# debootstrap makes a base image where no registry can be reached.
apt-get install -y -qq --no-install-recommends docker.io debootstrap iptables >/dev/null
# Some installations start it at once. The tests use that one, then.
