"""Names of a parameter's quantizers, by module path, and what `te_inductor.state_dict` calls it.

A path is relative to a root, and there are several: each compiled region has one, and so has the module that a user
asks for state. One module is `head` seen from the one and `decoder.head` seen from the other."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

SLOTS = ("input", "weight", "grad_output")
ROOT = "(root)"  # in names: the root, where it uses a parameter of another module


@dataclass(frozen=True)
class StateSite:
    """A parameter may serve several, as a tied weight or an expert's slice."""

    module: str  # whose forward uses the parameter, from some root
    owner: str  # a module that holds it, from the same one; Dynamo knows a tied weight by the first that it meets
    part: str  # what is taken of the parameter; "" is all of it
    slot: str  # one of SLOTS


def weight_site(part: str) -> StateSite:
    """The site of a weight; a tied one has one, whichever modules hold it or use it."""
    return StateSite("", "", part, "weight")


def same_site(sites: Iterable[StateSite], site: StateSite) -> list[StateSite]:
    """Returns those of a parameter's sites that may be `site` seen from another root; `site` itself alone. More than
    one where paths do not tell them apart: of `encoder.proj` and `decoder.proj`, which is `proj`?"""
    likely = [other for other in sites if _may_be_same(other, site)]
    return [site] if site in likely else likely


def _may_be_same(a: StateSite, b: StateSite) -> bool:
    if (a.part, a.slot) != (b.part, b.slot):
        return False
    long, short = (a, b) if len(a.module) >= len(b.module) else (b, a)
    root = _root_of(long.module, short.module)
    if root is None or short.module or not root:
        return root is not None  # the owners may be two of a tied weight's
    # A root that uses another module's parameter is not any module that does.
    return not short.owner or long.owner == _join(root, short.owner)


def _root_of(path: str, tail: str) -> str | None:
    """Finds where a module's path starts that is `path` from here and `tail` from there; None if it can be no one
    module's."""
    if not tail:
        return path
    if path == tail:
        return ""
    return path.removesuffix(f".{tail}") if path.endswith(f".{tail}") else None


def _join(*paths: str) -> str:
    return ".".join(filter(None, paths))


@dataclass(frozen=True)
class Place:
    """A site as a user sees it who knows the parameter by certain names."""

    alias: int  # which of the names
    use: str  # the module that uses it, where that is none of those that hold it, and the part; "" as a rule
    slot: str


def place_of(site: StateSite, names: Sequence[str]) -> Place:
    """Says where a site is for a user who knows its parameter by these names, from a root of his own."""
    if site.slot == "weight":
        return Place(0, site.part, site.slot)
    holders = [name.rpartition(".")[0] for name in names]
    module, alias = _from(holders, site)
    if module in holders:
        return Place(holders.index(module), site.part, site.slot)
    return Place(alias, ", ".join(filter(None, (f"in {module or ROOT}", site.part))), site.slot)


def _from(holders: Sequence[str], site: StateSite) -> tuple[str, int]:
    """A site's module from the root of the holders' paths, and which of them is the site's owner."""
    # The nearest root at which the owner is one of the holders, as seen by the site.
    for _, alias, holder in sorted((abs(len(h) - len(site.owner)), i, h) for i, h in enumerate(holders)):
        above, below = _root_of(holder, site.owner), _root_of(site.owner, holder)
        if above is not None:
            return _join(above, site.module), alias
        if below is not None:
            inside = _root_of_child(site.module, below)
            if inside is not None:
                return inside, alias
    # The owner is none of these; the module may be, if it is not a root that uses another module's parameter.
    for holder in holders if site.module or not site.owner else ():
        if _root_of(holder, site.module) is not None or _root_of(site.module, holder) is not None:
            return holder, 0
    return site.module, 0


def _root_of_child(path: str, parent: str) -> str | None:
    """`path` as seen from `parent`; None if it is not inside."""
    if path == parent:
        return ""
    return path.removeprefix(f"{parent}.") if path.startswith(f"{parent}.") else None


def site_of(place: Place, names: Sequence[str]) -> StateSite:
    """`place_of` backwards: the site from the root of the names."""
    owner, use, part = names[place.alias].rpartition(".")[0], "", place.use
    if place.slot == "weight":
        return weight_site(part)
    if not place.use.startswith("in "):
        return StateSite(owner, owner, part, place.slot)
    use, _, part = place.use.removeprefix("in ").partition(", ")
    return StateSite("" if use == ROOT else use, owner, part, place.slot)


# Names: `layers.0.gate_proj.input` of the parameter layers.0.gate_proj.weight, `experts.w1[select_0_3].input` of a
# slice of experts.w1, `embed[in head].input` where head uses embed.weight.


def base_of(name: str) -> str:
    """What the names of a parameter's quantizers begin with: its own name, without the last `weight`."""
    module, _, leaf = name.rpartition(".")
    return module if leaf == "weight" else name


def name_of(place: Place, names: Sequence[str]) -> str:
    return join(base_of(names[place.alias]), place.use, place.slot)


def join(base: str, use: str, slot: str) -> str:
    return _join(base + (f"[{use}]" if use else ""), slot)


def parse(name: str, bases: Mapping[str, object]) -> tuple[str, str, str] | None:
    """`join` backwards, the base one of those given; None where it is no quantizer's name."""
    head, _, slot = name.rpartition(".")
    if slot not in SLOTS:
        return None
    if head in bases:
        return head, "", slot
    opening = head.find("[")
    while opening >= 0 and head.endswith("]"):  # a module may have a bracket in its own name
        if head[:opening] in bases:
            return head[:opening], head[opening + 1 : -1], slot
        opening = head.find("[", opening + 1)
    return None
