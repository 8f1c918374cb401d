#!/bin/sh
# Install docker-compose, which the local mode of SageMaker's SDKs needs, where there is none.
set -eu
if command -v docker-compose >/dev/null || docker compose version >/dev/null 2>&1; then exit 0; fi
if [ "$(id -u)" -ne 0 ] || ! command -v apt-get >/dev/null; then
    echo "make test-systems needs docker compose: install Docker's plugin or docker-compose." >&2
    exit 1
fi
echo "installing docker-compose for the tests ..."
export DEBIAN_FRONTEND=noninteractive
apt-get update -qq
apt-get install -y -qq --no-install-recommends --no-remove docker-compose >/dev/null
