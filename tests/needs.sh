#!/bin/sh
# Say in one line what tests need that pip does not bring and this machine lacks. Nothing is
# installed: .ci/run does that, and asks for Debian's packages.
#   needs.sh test
#   needs.sh --packages test
set -eu
form=line
if [ "$1" = --packages ]; then form=packages && shift; fi
tests=$1 missing="" packages=""
engine="a container engine that answers (or dockerd, as root)"

need() { # WHAT, and the packages that have it
    missing="$missing${missing:+, }$1"
    shift
    packages="$packages${packages:+ }$*"
}

there() { command -v "$1" >/dev/null 2>&1; }

python_can() { "${PYTHON:-python3}" -c "$1" 2>/dev/null; }

engine_answers() { there docker && docker info >/dev/null 2>&1; }

engine_can_be_started() { there docker && there dockerd && [ "$(id -u)" -eq 0 ]; }

there make || need make make
there git || need git git # for tests of what a clean clone has
# The toolkit's C extension is built, and psutil's may have to be.
there cc || need cc gcc libc6-dev
python_can "import os, sysconfig; os.stat(sysconfig.get_path('include') + '/Python.h')" ||
    need "Python's headers" python3-dev
python_can "import ensurepip, venv" || need "Python's venv" python3-venv
case $tests in
test-containers | test-slow | matrix)
    # debootstrap makes a base image where none can be pulled.
    engine_can_be_started || engine_answers ||
        need "$engine" docker.io debootstrap iptables ca-certificates
    there ip || need ip iproute2 # for hosts in network namespaces
    ;;
esac
case $tests in
test-pages)
    there chromium-headless-shell || there chromium || there google-chrome ||
        need "Chromium or Chrome" chromium
    ;;
test-containers | test-slow)
    there docker-compose || docker compose version >/dev/null 2>&1 ||
        need "docker compose" docker-compose # for the local mode of SageMaker's SDKs
    ;;
esac

if [ $form = packages ]; then
    echo "$packages"
elif [ -n "$missing" ]; then
    echo "make $tests needs $missing: apt-get install $packages (.ci/run installs it, too)." >&2
    exit 1
fi
