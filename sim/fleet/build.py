"""A fleet from the section `[fleet]` of an experiment's file."""

from dataclasses import replace
from pathlib import Path

import numpy as np

from umbel.aggregation.seeds import derive_seed
from umbel.sim.fleet.draws import Trait, log_normal
from umbel.sim.fleet.fates import Dropouts
from umbel.sim.fleet.faults import Faults
from umbel.sim.fleet.files import Phone, named_by, read_phones, read_presence, recorded_trace
from umbel.sim.fleet.fleet import Devices, Fleet, Network, Speed, Stragglers
from umbel.sim.fleet.presence import HOUR_S, Always, Charging, Hours, Presence, Zones
from umbel.sim.fleet.recorded import recorded_fleet
from umbel.sim.fleet.section import DropoutsSection, FleetSection, NetworkSection, SpeedSection
from umbel.sim.fleet.without import WithoutDevices

_KB = 1000.0


def devices_of(
    section: FleetSection | None, seed: int, folder: Path, data: Path | None = None, *, draws_by_size: bool = False
) -> Devices:
    """As `build_fleet`; without a section, clients without devices. `draws_by_size`: as for `WithoutDevices`."""
    return WithoutDevices(seed, draws_by_size) if section is None else build_fleet(section, seed, folder, data)


def build_fleet(section: FleetSection, seed: int, folder: Path, data: Path | None = None) -> Fleet:
    """The fleet that a section describes. `seed`: of the experiment.

    `folder`: for the relative paths of a trace and of a file of presence; `data`: for that of phones. Raises
    `ValueError`, with a sentence, for a file that cannot be read or is not valid.
    """
    seed = derive_seed(seed, "fleet")
    faults = Faults(seed, section.corrupt, section.malicious)
    slow = section.stragglers
    stragglers = None if slow is None else Stragglers(seed, slow.share, *slow.work)
    if section.recorded is not None:
        trace = recorded_trace(section.recorded, folder)
        try:
            fleet = recorded_fleet(trace, seed, faults, section.waiting)
        except ValueError as error:
            raise ValueError(f"{folder / section.recorded}: {error}") from error
        return replace(
            fleet, stragglers=stragglers, partial_work=section.partial_work, notices_lost=section.notices_lost
        )
    zones = Zones(seed, section.zones)
    speed, network = section.speed or SpeedSection(), section.network or NetworkSection()
    return Fleet(
        seed=seed,
        speed=_speed(speed, seed),
        network=_network(network, seed, data),
        presence=_presence(section, seed, zones, folder),
        dropouts=_dropouts(section.dropouts or DropoutsSection(), seed, zones),
        faults=faults,
        waiting_factor=section.waiting,
        stragglers=stragglers,
        partial_work=section.partial_work,
        notices_lost=section.notices_lost,
    )


def _speed(section: SpeedSection, seed: int) -> Speed:
    known = (np.log([section.median_s]), np.array([section.between]), np.array([section.jitter]))
    trait = Trait("speed", seed, *known, tail=section.tail)
    return Speed(trait, "step" if section.samples_per_s is None else "sample")


def _network(section: NetworkSection, seed: int, data: Path | None) -> Network:
    if section.phones is None:
        down = log_normal("down", seed, section.down, section.between, section.within)
        return Network(down, log_normal("up", seed, section.up, section.between, section.within), section.latency_s)
    if data is None:
        raise ValueError(
            f"fleet.network.phones names the file {section.phones} in the data folder, but no data folder was given: "
            "pass it with --data"
        )
    with named_by("fleet.network.phones", data / section.phones):
        phones = read_phones(data / section.phones)
    return Network(*phone_traits(phones, seed), section.latency_s)


def phone_traits(phones: tuple[Phone, ...], seed: int) -> tuple[Trait, Trait]:
    """Bytes per second down and up: each device is a phone, its rate in a round log-normal with the phone's moments."""
    down = _trait("down", seed, [(phone.down_u, phone.down_sigma) for phone in phones])
    return down, _trait("up", seed, [(phone.up_u, phone.up_sigma) for phone in phones])


def _trait(name: str, seed: int, moments: list[tuple[float, float]]) -> Trait:
    mean, deviation = np.array(moments).T * _KB
    variance = np.log1p((deviation / mean) ** 2)
    return Trait(name, seed, np.log(mean) - variance / 2, np.zeros(len(mean)), np.sqrt(variance), is_drawn=True)


def _presence(section: FleetSection, seed: int, zones: Zones, folder: Path) -> Presence:
    if (hours := section.hours) is not None:
        return Hours(seed, zones, np.array(hours.shares), hours.habit, np.ones(1))
    if (charging := section.charging) is not None:
        return Charging(seed, zones, charging.plugged_at, charging.hours, charging.spread_h)
    if (presence := section.presence) is not None:
        with named_by("fleet.presence.file", folder / presence.file):
            return read_presence(folder / presence.file, presence.cycle_s)
    return Always()


def _dropouts(section: DropoutsSection, seed: int, zones: Zones) -> Dropouts:
    return Dropouts(
        seed=seed,
        zones=zones,
        per_round=np.array([section.per_round]),
        per_s=np.array([section.per_hour / HOUR_S]),
        by_hour=np.array(section.by_hour or (1.0,)),
        weights=section.secure_weights,
        returns=section.returns,
        away_s=section.away_s,
        away_spread=section.away_spread,
    )
