"""The product of the registries: every operation on every cell, or refused with a reason.

A cell writes (plain, masked, prefix-valid, encoded), reads, gathers, moves with overlap, offloads
and loads, transfers by memcpy and clears; after each the arena equals, byte for byte, what address
arithmetic on the plan and the codec alone say. The run ends with the account of all cells.
"""

from __future__ import annotations

import pytest
from pool_cells import GEOMETRIES, INDEXES, STATES, Account, Cell, Record, report

from kvfactory.layouts import LAYOUTS
from kvfactory.quant import SCHEMES

LAYOUT_NAMES = (*LAYOUTS.names(), "toy_inside_out")
QUANT_NAMES = (*SCHEMES.names(), "toy_sixteenths")
PAGES = (1, 16, 64, 128)
ROLES = {
    "dim128_k_only": ("k",),
    "mla512_64": ("latent", "rope"),
    "mla512_0": ("latent",),
    "index128": ("index_k",),
    "index128_64": ("index_k", "index_v"),
} | dict.fromkeys(STATES, ("state",))

pytestmark = pytest.mark.usefixtures("third_party")


@pytest.mark.parametrize("layout", LAYOUT_NAMES)
@pytest.mark.parametrize("geometry", [*GEOMETRIES, *INDEXES, *STATES])
def test_every_quant_and_layout_at_every_geometry(
    geometry: str, layout: str, record_property: Record
) -> None:
    roles = ROLES.get(geometry, ("k", "v"))
    account = Account()
    account.run(
        Cell(geometry, tuple((role, name) for role in roles), layout) for name in SCHEMES.names()
    )
    report(account, record_property)


@pytest.mark.parametrize("layout", LAYOUT_NAMES)
@pytest.mark.parametrize("k_quant", QUANT_NAMES)
def test_every_pair_of_quants_and_layout(
    k_quant: str, layout: str, record_property: Record
) -> None:
    """Page sizes are covered pairwise with K formats, V formats and layouts."""
    shift = QUANT_NAMES.index(k_quant) + LAYOUT_NAMES.index(layout)
    account = Account()
    account.run(
        Cell(
            "dim128", (("k", k_quant), ("v", v_quant)), layout, PAGES[(shift + number) % len(PAGES)]
        )
        for number, v_quant in enumerate(SCHEMES.names())
    )
    report(account, record_property)


@pytest.mark.parametrize("layout", LAYOUT_NAMES)
def test_latent_and_rope_formats_differ(layout: str, record_property: Record) -> None:
    account = Account()
    for name in SCHEMES.names():
        account.run(
            Cell("mla512_64", (("latent", a), ("rope", b)), layout, 64)
            for a, b in ((name, "plain"), ("fp8_tile128", name))
        )
    report(account, record_property)


@pytest.mark.parametrize("name", SCHEMES.names())
def test_options_and_alignment(name: str, record_property: Record) -> None:
    """Centers, per-head scales, and padding between planes."""
    account = Account()
    options = [{"center": True}]
    if name.startswith("fp8_e") and "token" not in name:
        options.append({"center": True, "scale": "head"})
    for chosen in options if name != "state_int8" else []:
        account.run(
            Cell("dim128", (("k", name), ("v", name)), layout, 64, chosen, align_bytes=128)
            for layout in ("nhd", "page_major", "record", "vectorized")
        )
    report(account, record_property)


def test_the_toys_are_in_the_product() -> None:
    assert set(LAYOUT_NAMES) == set(LAYOUTS.names())
    assert set(QUANT_NAMES) == set(SCHEMES.names())
