"""Contract tests for authors of other stores; they need pytest.

Subclass `Backend` to describe how to open, damage and disconnect your store. pytest then runs the contract against it:

    from holdfast.testing import Backend, StoreContract

    class MyBackend(Backend):
        def open_store(self) -> MyStore: ...  # with fresh state
        def reopen(self, store): ...  # a second client of the same state
        def losing_answers(self, store, when): ...  # lose the answer to the next commit
        def damage(self, store, key, content): ...  # overwrite a document behind the store's back
        def stored(self, store, key): ...  # the stored bytes of a document

    class TestMyStore(MyBackend, StoreContract):
        pass

`Backend` documents these methods and the optional ones.
"""

from holdfast.testing.backend import Backend, Recipe, When
from holdfast.testing.contract import StoreContract

__all__ = ["Backend", "Recipe", "StoreContract", "When"]
