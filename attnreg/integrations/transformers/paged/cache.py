"""transformers' paged cache, whose keys attnreg reads in place.

From 5.24 on, an attention module stores into the cache itself, and its attention function gets keys that the cache
has gathered. A cache of `served_class` then stores and gathers nothing: it returns stand-ins. attnreg's attention
function stores the new keys behind them and reads the pages. Before 5.24 no module calls the cache.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from attnreg.integrations.transformers.forms.releases import unrecognised
from attnreg.integrations.transformers.forms.stand_ins import behind_of, stand_ins
from attnreg.integrations.transformers.paged.batches import PagedGroup, group_of, own_update, validate_groups
from attnreg.runtime.interface import UnclaimedError


class Stored:
    """New keys and values [1, KV heads, tokens, size] of a layer, until attnreg's attention function stores them."""

    unread = (
        "keys or values of the paged cache, which attnreg's attention function alone reads within continuous_batching; "
        "use model.generate, or generate_batch outside of that block"
    )

    def __init__(self, group: PagedGroup, key: Tensor, value: Tensor) -> None:
        self.group, self.key, self.value = group, key, value
        self._copies: tuple[Tensor, Tensor] | None = None

    def copies(self, key: Tensor, value: Tensor, kwargs: dict[str, Any]) -> tuple[Tensor, Tensor]:
        """The result of `PagedGroup.update`, made once for all layers that share these keys."""
        if self._copies is None:
            self._copies = self.group.update(key, value, kwargs)
        return self._copies


def stored_in(key: Tensor, value: Tensor) -> Stored | None:
    """The new keys and values behind a call's stand-ins of a paged cache; None for other tensors."""
    behind = behind_of(key, value)
    return behind if isinstance(behind, Stored) else None


def served_class(kind: type[Any], is_served: Callable[[Any], bool], is_unmasked: Callable[[Any], bool]) -> type[Any]:
    """A class of paged caches whose keys attnreg reads, for configs that are served at the time of a call.

    is_served: whether attnreg's function attends for models of a config. is_unmasked: whether transformers builds no
    mask for them; a cache of such a model raises `UnclaimedError` once its config is no longer served.
    """
    own = own_update(kind)

    class ServedCache(kind):  # type: ignore[misc]
        update_of_transformers = own

        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            validate_groups(self)
            self._attnreg_unmasked = is_unmasked(self.config)

        @torch.compiler.disable  # type: ignore[untyped-decorator]
        def update(self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **more: Any) -> Any:
            if not is_served(self.config):
                if self._attnreg_unmasked:
                    raise UnclaimedError(
                        "a manager of continuous batching was made within attnreg's continuous_batching, where "
                        "transformers builds no mask, and that block has ended; generate within it, or call "
                        "model.destroy_cached_continuous_batching_manager()",
                        "attnreg",
                    )
                return own(self, key_states, value_states, layer_idx, *args, **more)
            given = more.get("kwargs")
            if args or more.keys() != {"kwargs"} or not isinstance(given, dict):
                names = ", ".join(more)
                raise unrecognised(f"a module stores into the paged cache with {len(args)} more arguments and {names}")
            group = group_of(self, layer_idx)
            read = group.read_index(given)
            keys = read.numel() or key_states.shape[2]
            return stand_ins(Stored(group, key_states, value_states), key_states, value_states, keys)

    ServedCache.__name__ = ServedCache.__qualname__ = kind.__name__
    return ServedCache
