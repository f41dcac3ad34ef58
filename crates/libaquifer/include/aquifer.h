/* Regions of Aquifer: memory in the pool, with local RAM as its cache.
 *
 * `aquifer region create` creates a region; the memory of a VM in the pool is a region too. A
 * program maps a region with aquifer_map(), without a preloaded library, and uses it as any memory.
 * aquifer_open() opens a region without mapping it, to read its state. Link with -laquifer.
 *
 * A page is AQUIFER_PAGE_SIZE bytes long. Pages are numbered from 0. Functions that return int
 * return 0, or -1 on failure; aquifer_error() then returns the reason. Any thread may call any
 * function. Close a region only when no thread uses it any more.
 *
 * A forked child must not use a region that its parent mapped: the child does not have the mapping.
 * madvise(MADV_REMOVE) on a region fails with EINVAL, as the kernel would remove only the pages in
 * local RAM. Use aquifer_drop() instead.
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
    AQUIFER_ZERO = 0,     /* never written, or dropped; it reads as zeroes */
    AQUIFER_REMOTE = 1,   /* with a lender only */
    AQUIFER_RESIDENT = 2, /* in local RAM, and not known to differ from the lender's version */
    AQUIFER_DIRTY = 3,    /* in local RAM, and known to differ from the lender's version */
    AQUIFER_SHARED = 4    /* kept once in local RAM for several regions of the group */
};

/* The number of states. A later release may add some, so check a state before you index by it. */
#define AQUIFER_PAGE_STATES 5

/* The figures of a region: bytes, and counts since its engine started. */
struct aquifer_metadata {
    uint64_t size;          /* bytes of the region */
    uint64_t cache;         /* bytes that may be in local RAM */
    uint64_t resident;      /* bytes in local RAM */
    uint64_t dirty;         /* of these, known to differ from the lenders' version */
    uint64_t remote;        /* bytes with lenders only */
    uint64_t zero;          /* bytes never written, or dropped */
    uint64_t zero_faults;   /* faults on such pages */
    uint64_t remote_faults; /* faults that fetched a page */
    uint64_t waiting;       /* faults that wait for an unreachable lender */
    uint64_t extents;       /* extents of 64 MiB with lenders: see aquifer_extent() */
};

/* Where an extent of a region is. */
struct aquifer_extent {
    uint64_t from;     /* its first byte in the region */
    uint64_t at;       /* its first byte in the lease */
    uint8_t lease[16]; /* the lease's id */
    char address[256]; /* the lender's address, terminated by a zero byte */
};

struct aquifer_region;

/* Opens the region with this file (RUN_DIR/regions/NAME), without mapping it. Returns NULL on
 * failure. */
struct aquifer_region *aquifer_open(const char *file);

/* Opens a region and maps it into this process. Returns NULL on failure. */
struct aquifer_region *aquifer_map(const char *file);

/* Returns the mapped memory: as many bytes as aquifer_metadata.size, aligned to pages. Returns NULL
 * if the region was opened without mapping it. */
void *aquifer_memory(const struct aquifer_region *region);

/* Unmaps and closes the region. Its content stays in the region. */
void aquifer_close(struct aquifer_region *region);

/* 1. Sets the limit of the local cache in bytes. Returns once the cache is within the limit. */
int aquifer_cache_size(const struct aquifer_region *region, uint64_t bytes);

/* 2. Writes an aquifer_page_state for each of `count` pages, from page `first` on, to `states`.
 * Needs no request to the engine, and delays no program. */
int aquifer_page_states(const struct aquifer_region *region, uint64_t first, uint64_t count,
                        uint8_t *states);

/* 3. Writes all changes made before the call back to the lenders. Other threads may go on
 * writing. */
int aquifer_persist(const struct aquifer_region *region);

/* 4. Makes `count` pages from page `first` on read as zeroes, and frees their memory here and at
 * the lenders. */
int aquifer_drop(const struct aquifer_region *region, uint64_t first, uint64_t count);

/* 5. Writes the figures of the region to `metadata`; and the place of an extent, with `index` from
 * 0 to one less than aquifer_metadata.extents, to `extent`. */
int aquifer_get_metadata(const struct aquifer_region *region, struct aquifer_metadata *metadata);
int aquifer_extent(const struct aquifer_region *region, uint64_t index,
                   struct aquifer_extent *extent);

/* Returns the reason of this thread's last failed call. The text is valid until this thread's next
 * failed call. */
const char *aquifer_error(void);

#ifdef __cplusplus
}
#endif

#endif
