#!/bin/sh
# One example hospital: it enrols with the token that the operator made for it, and trains until the run is finished.
set -eu
: "${UMBEL_SERVER:?the coordinator's address}"
# The token is in the environment, because every user of a machine can read the arguments of a command.
UMBEL_TOKEN="$(cat "${STATE:-/state}/token")"
export UMBEL_TOKEN
exec umbel join --run breast-cancer --app examples.my_hospital:client --name "$1" --state "${STATE:-/state}/client"
