"""Sizes, and the arithmetic of windows, rings and step records. No tensor is touched here."""

from __future__ import annotations

from dataclasses import dataclass

from .errors import ArgumentError, DTypeError

QK_NORM_EPS = 1e-6
"""Added to the sum of squares under the root when q and k are normalised."""


@dataclass(frozen=True)
class GDNShape:
    """Head counts and head dims of a Gated DeltaNet layer.

    Value head `hv` reads key head `hv // (num_v_heads // num_k_heads)`.

    Args:
        num_k_heads: H, key (and query) heads.
        num_v_heads: HV, value heads, a multiple of H.
        head_k_dim: K.
        head_v_dim: V.

    Raises:
        ArgumentError: a size below 1, or HV not a multiple of H.
        DTypeError: a size that is not an int.

    >>> shape = GDNShape(num_k_heads=2, num_v_heads=4, head_k_dim=64, head_v_dim=32)
    >>> shape.qkv_dim, shape.heads_per_key
    (384, 2)
    """

    num_k_heads: int
    num_v_heads: int
    head_k_dim: int
    head_v_dim: int

    def __post_init__(self) -> None:
        for name in ("num_k_heads", "num_v_heads", "head_k_dim", "head_v_dim"):
            require_int("GDNShape", name, getattr(self, name), minimum=1)
        if self.num_v_heads % self.num_k_heads:
            raise ArgumentError(
                f"GDNShape: num_v_heads: expected a multiple of num_k_heads={self.num_k_heads}, got {self.num_v_heads}"
            )

    @property
    def sizes(self) -> tuple[int, int, int, int]:
        """(H, HV, K, V)."""
        return self.num_k_heads, self.num_v_heads, self.head_k_dim, self.head_v_dim

    @property
    def heads_per_key(self) -> int:
        """HV / H."""
        return self.num_v_heads // self.num_k_heads

    @property
    def qkv_dim(self) -> int:
        """Width of a packed token: 2 H K + HV V."""
        return 2 * self.num_k_heads * self.head_k_dim + self.num_v_heads * self.head_v_dim


def require_int(fn: str, name: str, value: object, *, minimum: int) -> int:
    """Return value as int, or raise naming function and argument."""
    if isinstance(value, bool) or not isinstance(value, int):
        raise DTypeError(f"{fn}: {name}: expected an int, got {type(value).__name__}")
    if value < minimum:
        raise ArgumentError(f"{fn}: {name}: expected at least {minimum}, got {value}")
    return value


def is_power_of_two(n: int) -> bool:
    """True for 1, 2, 4, ..."""
    return n >= 1 and n & (n - 1) == 0


def ring_slots_for(window: int, max_query_len: int) -> int:
    """Physical ring slots R: the smallest power of two that holds a full window and one step.

    >>> ring_slots_for(16, 8), ring_slots_for(32, 16)
    (32, 64)
    """
    return 1 << (window + max_query_len - 1).bit_length()


def check_window(fn: str, window: int, max_query_len: int, ring_slots: int | None = None) -> int:
    """Validate W, T and R against each other and return R.

    Raises:
        ArgumentError: W not a power of two, T > W, R not a power of two, or R < W + T. The message names the numbers.
    """
    require_int(fn, "window", window, minimum=1)
    require_int(fn, "max_query_len", max_query_len, minimum=1)
    if not is_power_of_two(window):
        raise ArgumentError(f"{fn}: window: expected a power of two, got {window}")
    if max_query_len > window:
        raise ArgumentError(f"{fn}: max_query_len: expected at most window={window}, got {max_query_len}")
    if ring_slots is None:
        return ring_slots_for(window, max_query_len)
    if not is_power_of_two(ring_slots):
        raise ArgumentError(f"{fn}: ring slots: expected a power of two, got {ring_slots}")
    if ring_slots < window + max_query_len:
        raise ArgumentError(
            f"{fn}: ring slots: expected R >= W + T = {window} + {max_query_len} (window + max_query_len), "
            f"got {ring_slots}"
        )
    return ring_slots


def flush_min(window: int, executed_width: int) -> int:
    """Smallest window length at which a step of this width folds: the next commit could not fit otherwise.

    >>> flush_min(16, 4), flush_min(16, 1)
    (13, 16)
    """
    return window + 1 - executed_width


def step_record(executed_width: int, row_length: int) -> int:
    """Pack what a step leaves behind for its commit into one int32; 0 means no step is pending."""
    return (executed_width << 16) | row_length


def read_step_record(record: int) -> tuple[int, int]:
    """(executed_width, row_length) of a record.

    >>> read_step_record(step_record(8, 3))
    (8, 3)
    """
    return record >> 16, record & 0xFFFF
