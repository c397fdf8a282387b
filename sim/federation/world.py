"""What a simulated run meets: clients with their data, their devices, and the engine that does their work."""

from dataclasses import dataclass, field

from umbel.sim.data.population import Population
from umbel.sim.engines.clients.work import ClientsEngine
from umbel.sim.engines.work import Engine
from umbel.sim.federation.local_work import Meter
from umbel.sim.federation.measures import MeasureSection
from umbel.sim.federation.own_clients import OwnClients
from umbel.sim.federation.site_policies import SitePolicies
from umbel.sim.fleet.fleet import Devices


@dataclass(frozen=True, slots=True)
class World:
    """One for all attempts of a run."""

    population: Population
    fleet: Devices
    engine: Engine | None  # None: the clients train themselves (`clients`)
    meter: Meter | None  # None: as above
    masks: bool = False  # whether clients of a secure round make keys and masks; their sum does not depend on it
    measure: MeasureSection = field(default_factory=MeasureSection)
    clients: OwnClients | None = None  # real `Client` objects, which are then the population too
    sites: SitePolicies = field(default_factory=SitePolicies)

    @property
    def worker(self) -> Engine | ClientsEngine:
        """What does the clients' work."""
        found = self.engine if self.clients is None else self.clients.engine
        assert found is not None, "a world has an engine or clients"
        return found

    def close(self) -> None:
        """Release what does the clients' work."""
        (self.worker if self.clients is None else self.clients).close()
