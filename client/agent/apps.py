"""Which code of the site trains in which run. The code is always the site's own."""

from collections.abc import Sequence
from dataclasses import dataclass

from umbel.client.errors import AppError
from umbel.client.policy.run_names import is_named_by, require_run_pattern

APP_METAVAR = "PATTERN=MODULE:NAME"


@dataclass(frozen=True, slots=True)
class AppRule:
    """Runs that this pattern names are trained by the code `spec`, as `module:attribute`."""

    pattern: str
    spec: str


def app_rule(text: str) -> AppRule:
    """The rule of one `--app`. Without a pattern it holds for every run. Raises `AppError`."""
    pattern, equals, spec = text.partition("=")
    rule = AppRule(pattern.strip(), spec.strip()) if equals else AppRule("*", text.strip())
    module, colon, attribute = rule.spec.partition(":")
    if not (module and colon and attribute):
        raise AppError(
            f"--app must look like {APP_METAVAR}, such as 'heart-*=my_hospital:client', or like MODULE:NAME for every "
            f"run, not {text!r}"
        )
    try:
        require_run_pattern(rule.pattern, "the pattern of --app")
    except ValueError as error:
        raise AppError(str(error)) from error
    return rule


def app_of(run: str, rules: Sequence[AppRule]) -> str | None:
    """The code for this run, by the first rule whose pattern names it; None if there is none."""
    return next((rule.spec for rule in rules if is_named_by((rule.pattern,), run)), None)
