"""What every store must do, as tests: subclass `StoreContract` in a test file, and fill in the backend.

    class TestMyStore(StoreContract):
        @pytest.fixture(autouse=True)
        def place(self, tmp_path: Path) -> None:
            self.path = tmp_path

        def open_store(self) -> Store:
            return MyStore(self.path)

        def reopen(self, store: Store) -> Store:
            return MyStore(self.path)

        def process_target(self, store: Store) -> Recipe:
            return Recipe(MyStore, (self.path,))

`losing_answers`, `damage` and `stored` reach behind the store's back, `disturbed` slows it down at bad
moments; what each has to do is told at `Backend`. Everything that is tested is promised in
`holdfast.store.model`; for comparing a store with the model see `holdfast.testing.model`.
"""

from __future__ import annotations

from holdfast.testing.contract_clients import Recipe
from holdfast.testing.contract_parts.backend import Backend, When
from holdfast.testing.contract_parts.documents import DocumentsContract
from holdfast.testing.contract_parts.isolation import IsolationContract
from holdfast.testing.contract_parts.limits import LimitsContract
from holdfast.testing.contract_parts.outcomes import OutcomesContract
from holdfast.testing.contract_parts.streams import StreamsContract
from holdfast.testing.contract_parts.watching import WatchingContract

__all__ = ["Backend", "Recipe", "StoreContract", "When"]


class StoreContract(
    DocumentsContract,
    IsolationContract,
    StreamsContract,
    WatchingContract,
    OutcomesContract,
    LimitsContract,
):
    """All parts of the contract."""
