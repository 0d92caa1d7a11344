"""What an enabled model did: counters kept on the host, free of device syncs."""

from __future__ import annotations

from dataclasses import dataclass, fields


@dataclass
class ReplayStats:
    """Counters of one enabled model, over all its caches since `enable` or the last `clear`.

    | field | counts |
    |---|---|
    | model_calls | forwards that ran with a cache |
    | tokens | tokens of those forwards, over batch rows |
    | prefill_tokens | the part of them that went through `gated_delta_rule` |
    | step_tokens | the part of them that went through `replay_step` |
    | cropped_tokens | tokens taken back by `crop`, over batch rows |
    | folds | windows folded into their checkpoints, over batch rows; a fold folds every layer |
    | drafted | candidate tokens that this model, as the target, was asked to verify |
    | accepted | candidate tokens of those that it kept |
    | state_bytes_read | bytes of checkpoints and rings read by steps and folds, over layers |
    | state_bytes_written | bytes of checkpoints and rings written by steps and folds, over layers |

    The bytes are those that the algorithm needs (each element once per step), not what a kernel happens to move.

    >>> stats = ReplayStats(drafted=10, accepted=7, model_calls=4)
    >>> stats.acceptance, stats.accepted_per_call
    (0.7, 1.75)
    """

    model_calls: int = 0
    tokens: int = 0
    prefill_tokens: int = 0
    step_tokens: int = 0
    cropped_tokens: int = 0
    folds: int = 0
    drafted: int = 0
    accepted: int = 0
    state_bytes_read: int = 0
    state_bytes_written: int = 0

    @property
    def acceptance(self) -> float:
        """accepted / drafted; 0.0 where nothing was drafted."""
        return self.accepted / self.drafted if self.drafted else 0.0

    @property
    def accepted_per_call(self) -> float:
        """Drafted tokens kept per forward; 0.0 before the first forward."""
        return self.accepted / self.model_calls if self.model_calls else 0.0

    def clear(self) -> None:
        """Set every counter to 0."""
        for field in fields(self):
            setattr(self, field.name, 0)
