#!/bin/sh
# Run a container engine in a folder until no process has a lock on a file any more, however the
# last one ended: keep-engine.sh FILE FOLDER ENGINE ARGUMENT ...
file=$1 folder=$2
shift 2
# It ends with us, even if we are killed, and takes its mounts with it.
setpriv --pdeathsig TERM unshare --mount "$@" &
engine=$!
exec 9>>"$file"
flock 9 # held until the engine has ended: who comes meanwhile waits
kill "$engine"
timeout 60 tail --pid="$engine" -f /dev/null || kill -KILL "$engine"
wait
rm -rf "$folder"
