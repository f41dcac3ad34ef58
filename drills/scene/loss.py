"""The loss of lenders with their pages, and the check that exactly their pages are lost."""

from scene import Failed

EXTENT_PAGES = (64 << 20) // 4096
# Pages that may leave RAM between the death and its notice: reads of other extents push them out.
MOST_LATE = 512


def lose(load, lenders: list) -> tuple[int, str]:
    """Kills the lenders of one extent for good, and reads every page. Returns how many pages must
    be lost, and what was found.

    Until the borrower knows of the death, a clean page may leave its RAM, and is lost too.
    """
    load.settle()
    load.run(2)
    remote = load.remote()
    for lender in lenders:
        lender.kill()
        lender.forget()
    # Every page is read while the lenders are away, and again when they are back without pages.
    away = load.verify()
    load.stall_ms = max(load.stall_ms, away["longest_ms"])
    for lender in lenders:
        lender.start()
    load.run(3)
    load.pause()
    load.verify()
    extents = {page // EXTENT_PAGES for page in load.lost}
    if len(extents) != 1:
        raise Failed(f"pages of extents {sorted(extents)} are lost; those of one extent must be")
    [extent] = extents
    there = {page for page in load.pages if page // EXTENT_PAGES == extent}
    expected = there & load.remote()
    if not expected >= there & remote:
        raise Failed("pages that were at the dead lenders only were read")
    late = len(expected - remote)
    if late > MOST_LATE:
        raise Failed(f"{late} pages left RAM after the death, and are lost with it")
    states = ", ".join(f"{lease['lender']} is {lease['state']}" for lease in load.leases())
    return len(expected), (
        f"extent {extent} but what was in RAM, and nothing else ({late} pages "
        f"left RAM after the death); an error after {away['longest_lost_ms'] / 1000:.1f} s at "
        f"most, with 128 threads; {states}"
    )
