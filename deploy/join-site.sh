#!/bin/sh
# One example hospital: enrols with the token the operator left for it, then trains until the run is finished.
set -eu
: "${UMBEL_SERVER:?the coordinator's address}"
# By environment, because arguments can be read by every user of a machine.
UMBEL_TOKEN="$(cat "${STATE:-/state}/token")"
export UMBEL_TOKEN
exec umbel join --run breast-cancer --app examples.my_hospital:client --name "$1" --state "${STATE:-/state}/client"
