"""A report as its client signed it, kept as evidence: what counts is a client's word, not only the coordinator's."""

from starlette.requests import Request

from umbel.aggregation.audit.bundle import SignedReport
from umbel.aggregation.audit.chain import report_target
from umbel.aggregation.plans.round import Task
from umbel.aggregation.types import AssignmentId
from umbel.server.http.auth import claims_of, target_of
from umbel.server.problems import Refused


def signed_report(request: Request, assignment: AssignmentId, task: Task, body: bytes) -> SignedReport:
    """What a verified request was signed with. Raises `Refused` for an address that auditors spell otherwise."""
    target = report_target(assignment, task)
    if target_of(request) != target:
        raise Refused("malformed-request", f"send a report to {target.path}, in this spelling and without a query")
    claims = claims_of(request)
    return SignedReport(body.decode(), claims.created, claims.nonce, claims.signature)
