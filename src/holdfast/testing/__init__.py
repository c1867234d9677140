"""The contract of a store, for authors of other stores. Needs pytest.

Subclass `Backend` to say how your store is opened, damaged and cut off; pytest runs the contract on it:

    from holdfast.testing import Backend, StoreContract

    class MyBackend(Backend):
        def open_store(self) -> MyStore: ...  # on fresh state
        def reopen(self, store): ...  # a second client of the same state
        def losing_answers(self, store, when): ...  # the answer to the next commit is lost
        def damage(self, store, key, content): ...  # overwrite a document behind the store's back
        def stored(self, store, key): ...  # the stored bytes of a document

    class TestMyStore(MyBackend, StoreContract):
        pass

`Backend` documents these methods and the optional ones.
"""

from holdfast.testing.backend import Backend, Recipe, When
from holdfast.testing.contract import StoreContract

__all__ = ["Backend", "Recipe", "StoreContract", "When"]
