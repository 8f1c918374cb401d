#!/bin/sh
# Run a command with a container engine: the one that answers, or one that ends with the command.
# Where none is installed, Debian's is.
#
#   sh tests/cluster/with-engine.sh pytest tests/cluster
set -eu
data=$(cd "$(dirname "$0")/../.." && pwd)/.engine # images stay for the next time

if docker info >/dev/null 2>&1; then exec "$@"; fi
if [ "$(id -u)" -ne 0 ]; then
    echo "no container engine answers; start one, run this as root, or" \
        "make test-without-containers" >&2
    exit 1
fi
if ! command -v docker >/dev/null || ! command -v dockerd >/dev/null; then
    if ! command -v apt-get >/dev/null; then
        echo "there is no container engine; install Docker, or make test-without-containers" >&2
        exit 1
    fi
    echo "installing a container engine for the tests ..."
    export DEBIAN_FRONTEND=noninteractive
    apt-get update -qq
    # debootstrap makes a base image where none can be pulled.
    apt-get install -y -qq --no-install-recommends --no-remove docker.io debootstrap iptables \
        >/dev/null
fi

folder=$(mktemp -d "${TMPDIR:-/tmp}/engine-XXXXXX")
mkdir -p "$data"
export DOCKER_HOST="unix://$folder/docker.sock"
# It ends with us, even if we are killed, and takes its mounts with it. As little as can be outlives
# it: no bridge, no forwarding. It does need rules of its own for packets, where an engine that ran
# before has left some that drop them.
setpriv --pdeathsig TERM unshare --mount dockerd --host "$DOCKER_HOST" --data-root "$data" \
    --exec-root "$folder/exec" --pidfile "$folder/pid" --bridge none --ip-forward=false \
    >"$data/dockerd.log" 2>&1 &
engine=$!

leave() {
    kill $engine 2>/dev/null || true
    wait $engine || true
    rm -rf "$folder"
}
trap leave EXIT
trap 'exit 143' TERM
trap 'exit 130' INT

until docker info >/dev/null 2>&1; do
    if ! kill -0 $engine 2>/dev/null; then
        tail -n 20 "$data/dockerd.log" >&2
        exit 1
    fi
    sleep 0.2
done
"$@"
