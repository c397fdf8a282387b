"""One reader as a libFuzzer target, in a process of its own: `python -m tests.fuzz.target READER [OPTIONS]`."""

import sys

import atheris  # type: ignore[import-untyped]  # it has no types


def main() -> None:
    with atheris.instrument_imports(include=["umbel"]):  # pyright: ignore[reportAttributeAccessIssue]  # it is there
        from tests.fuzz.readers import READERS
    name, *options = sys.argv[1:]
    atheris.Setup([sys.argv[0], *options, "-rss_limit_mb=2048", "-timeout=10"], READERS[name])
    atheris.Fuzz()


if __name__ == "__main__":
    main()
