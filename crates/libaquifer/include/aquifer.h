/* Regions of Aquifer: memory in the pool, with local RAM as its cache.
 *
 * A region is made by `aquifer region create`, or is that of a VM. A program maps it by aquifer_map(), without anything preloaded,
 * and uses it as any memory; or only asks about one that others have mapped, by aquifer_open(). Link with -laquifer.
 *
 * A page is of AQUIFER_PAGE_SIZE bytes. Pages are numbered from 0. Functions that return int return 0, or -1 when they failed; then
 * aquifer_error() says why. All of them may be called from any thread; a region may be closed once nobody uses it. A process that
 * has a region mapped must not use it in a child that it forks: the child does not have it. madvise(MADV_REMOVE) fails there (EINVAL),
 * as the kernel would remove only what is in local RAM: use aquifer_drop().
 */
#ifndef AQUIFER_H
#define AQUIFER_H

#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

#define AQUIFER_PAGE_SIZE 4096

/* Where a page is. */
enum aquifer_page_state {
    AQUIFER_ZERO = 0,     /* nowhere: never written, or dropped; it reads as zeroes */
    AQUIFER_REMOTE = 1,   /* with a lender only */
    AQUIFER_RESIDENT = 2, /* in local RAM, and as far as is known a lender has the same */
    AQUIFER_DIRTY = 3,    /* in local RAM, and known to differ from what a lender has */
    AQUIFER_SHARED = 4    /* kept once in local RAM for several regions of the group */
};

/* States that there are: a later release may add some, so do not index by one without looking. */
#define AQUIFER_PAGE_STATES 5

/* What is known of a region: bytes, and counts since its engine started. */
struct aquifer_metadata {
    uint64_t size;          /* bytes of the region */
    uint64_t cache;         /* bytes that may be in local RAM */
    uint64_t resident;      /* bytes in local RAM; */
    uint64_t dirty;         /* of these, known to differ from what lenders have */
    uint64_t remote;        /* bytes with lenders only */
    uint64_t zero;          /* bytes nowhere */
    uint64_t zero_faults;   /* faults on pages that were nowhere */
    uint64_t remote_faults; /* faults that fetched a page */
    uint64_t waiting;       /* faults that wait for a lender that cannot be reached */
    uint64_t extents;       /* extents of 64 MiB that are with lenders: see aquifer_extent() */
};

/* Where an extent of a region is. */
struct aquifer_extent {
    uint64_t from;     /* its first byte in the region */
    uint64_t at;       /* its first byte in the lease */
    uint8_t lease[16]; /* the lease's id */
    char address[256]; /* where it is reached: a text that ends with a zero */
};

struct aquifer_region;

/* Opens the region whose file this is (RUN_DIR/regions/NAME), to ask about it. NULL when that fails. */
struct aquifer_region *aquifer_open(const char *file);

/* Opens it and maps it into this process. NULL when that fails. */
struct aquifer_region *aquifer_map(const char *file);

/* Its memory: aquifer_metadata's size bytes, aligned to pages; NULL unless it was mapped. */
void *aquifer_memory(const struct aquifer_region *region);

/* Unmaps it, if it was mapped, and forgets it. What was written stays in the region. */
void aquifer_close(struct aquifer_region *region);

/* 1. Sets how many bytes of it may be in local RAM. Returns when that is so. */
int aquifer_cache_size(const struct aquifer_region *region, uint64_t bytes);

/* 2. Writes an aquifer_page_state for each of `count` pages, from page `first` on, to `states`. Asks nobody, and stops nobody. */
int aquifer_page_states(const struct aquifer_region *region, uint64_t first, uint64_t count, uint8_t *states);

/* 3. Has lenders have all that was written before the call. Others may go on writing. */
int aquifer_persist(const struct aquifer_region *region);

/* 4. Makes `count` pages from page `first` on read as zeroes, and gives back what they took, here and with lenders. */
int aquifer_drop(const struct aquifer_region *region, uint64_t first, uint64_t count);

/* 5. What is known of the region, and where its extents are: `index` from 0 to the metadata's extents. */
int aquifer_get_metadata(const struct aquifer_region *region, struct aquifer_metadata *metadata);
int aquifer_extent(const struct aquifer_region *region, uint64_t index, struct aquifer_extent *extent);

/* Why the last call of this thread failed: a text that stays until the next call of this thread that fails. */
const char *aquifer_error(void);

#ifdef __cplusplus
}
#endif

#endif
