"""The store contract by subject. `holdfast.testing.contract` puts the parts together."""

import pytest

pytest.register_assert_rewrite(
    *(
        f"{__name__}.{part}"
        for part in ("documents", "isolation", "limits", "outcomes", "streams", "watching")
    )
)
