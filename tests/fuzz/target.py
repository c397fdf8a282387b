"""One reader as a libFuzzer target, in a process of its own: `python -m tests.fuzz.target READER [OPTIONS]`."""

import resource
import sys

import atheris  # type: ignore[import-untyped]  # it has no types

_GROWTH_MB = 1024


def main() -> None:
    with atheris.instrument_imports(include=["umbel"]):  # pyright: ignore[reportAttributeAccessIssue]  # it is there
        from tests.fuzz.readers import READERS
    name, *options = sys.argv[1:]
    atheris.Setup([sys.argv[0], *options, f"-rss_limit_mb={_peak_mb() + _GROWTH_MB}", "-timeout=10"], READERS[name])
    atheris.Fuzz()


def _peak_mb() -> int:
    """The peak that libFuzzer measures, before it begins. On Linux a process takes over its parent's (over 2 GB for a
    pytest that has run other tests), so a limit that counts from zero finds fault with the parent.
    """
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss >> (20 if sys.platform == "darwin" else 10)


if __name__ == "__main__":
    main()
