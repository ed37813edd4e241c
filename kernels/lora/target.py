"""What of a model the deltas of one op are for."""

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True, slots=True)
class LoraTarget:
    """The sites of one projection, which share its input x, and the columns of its output y.

    It stays the same from step to step. Raises ValueError, naming the field.
    """

    layer: int
    sites: tuple[int, ...]
    """Their numbers in the layer."""
    num_sites: int
    """S."""
    spans: tuple[tuple[int, int], ...]
    """(start, width) of each site's columns in y; they are disjoint, and widths may be 0."""

    def __post_init__(self) -> None:
        if self.layer < 0 or self.num_sites < 1:
            raise ValueError(
                f"layer must be >= 0 and num_sites >= 1, got layer {self.layer}, num_sites "
                f"{self.num_sites}"
            )
        if any(not 0 <= site < self.num_sites for site in self.sites):
            raise ValueError(f"sites must be in [0, {self.num_sites}), got {self.sites}")
        if len(self.spans) != len(self.sites):
            raise ValueError(
                f"spans must have one (start, width) a site, got {self.spans} for {self.sites}"
            )
        end = 0
        for start, width in sorted(self.spans):
            if start < end or width < 0:
                raise ValueError(f"spans must be disjoint, from column 0 on, got {self.spans}")
            end = start + width

    @property
    def heads(self) -> tuple[int, ...]:
        """Word of a record at which the entry of each site begins."""
        return tuple(2 * (self.layer * self.num_sites + site) for site in self.sites)

    @property
    def columns(self) -> int:
        """Columns of y that it has at least."""
        return max((start + width for start, width in self.spans), default=0)


__all__ = ["LoraTarget"]
