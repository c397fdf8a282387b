"""A client's assignment, made from the stored state at each request, so that a repeated request gets the same one."""

import base64
import hashlib
from dataclasses import replace

from umbel.aggregation.plans.assignment import Assignment, SecureOffer
from umbel.aggregation.round.states import Closing, Training
from umbel.aggregation.types import ClientId
from umbel.server.services import Services
from umbel.server.store.stored import LiveRun
from umbel.server.sums.updates import RoundCodec


class Assignments:
    """Assignments of one run's newest attempt."""

    def __init__(self, services: Services, codec: RoundCodec) -> None:
        self._services = services
        self._codec = codec
        self._offer: tuple[int, SecureOffer] | None = None  # with the attempt's `round_id`

    async def of(self, live: LiveRun, client: ClientId, state: Training | Closing) -> Assignment:
        """The assignment of a client of the cohort. In a secure round the client ignores `seed` and draws its own."""
        plan, file = state.plan, live.run.file
        left_s = state.opened_at + plan.window_s + state.away_s - self._services.clock.now()
        return Assignment(
            id=live.assignment_id(client),
            run=plan.run,
            round=plan.number,
            attempt=plan.attempt,
            model=live.run.model,
            training=file.training_of(plan),
            codec=plan.codec,
            grid=plan.grid,
            sample_count_max=plan.sample_count_max,
            seed=plan.seed_of(client),
            window_s=max(0.0, left_s),
            task=plan.task,
            share=file.share_of(plan.task),
            rank=self._codec.rank(live, client),
            changes=live.run.changes,
            secure=await self._secure(live, client, state),
            tensors=file.tensor_rules,
        )

    async def _secure(self, live: LiveRun, client: ClientId, state: Training | Closing) -> SecureOffer | None:
        if not (state.exchange and state.plan.secure):
            return None
        if self._offer is None or self._offer[0] != live.round_id:
            names = sorted(state.cohort)
            keys = await self._services.registry.keys(names)
            section = live.run.file.secure
            assert section is not None, "a round is secure only if the run file is"
            offer = SecureOffer(
                attempt_id=state.exchange.attempt_id,
                opening_commitment=hashlib.sha256(bytes.fromhex(state.exchange.opening)).hexdigest(),
                cohort=tuple((name, base64.b64encode(keys[name]).decode()) for name in names),
                members_sha256=section.members_sha256,
                window_s=state.plan.window_s,
                plan=state.plan.secure,
            )
            self._offer = live.round_id, offer
        return replace(self._offer[1], draws=state.cohort[client].draws)
