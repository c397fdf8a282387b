"""Names of tensors of wrapped modules are those of the bare modules; other names stay as they are."""

import pytest

from umbel.client.local.bare_names import bare_name


@pytest.mark.parametrize(
    ("name", "bare"),
    [
        ("head.weight", "head.weight"),
        ("_orig_mod.head.weight", "head.weight"),
        ("body._checkpoint_wrapped_module.0._orig_mod.bias", "body.0.bias"),
        ("module.head.weight", "module.head.weight"),
        ("my_orig_mod.weight", "my_orig_mod.weight"),
        ("scale", "scale"),
    ],
)
def test_only_what_wrappers_have_put_in_is_left_out(name: str, bare: str) -> None:
    assert bare_name(name) == bare
