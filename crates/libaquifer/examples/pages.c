/* Writes to a region, writes it back to its lenders, and prints where its pages are.
 *
 * cc -o pages pages.c -laquifer && ./pages /run/aquifer/regions/NAME
 */
#include <aquifer.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static void check(int failed, const char *what) {
    if (failed) {
        fprintf(stderr, "%s: %s\n", what, aquifer_error());
        exit(1);
    }
}

int main(int argc, char **argv) {
    if (argc != 2) {
        fprintf(stderr, "usage: %s FILE\n", argv[0]);
        return 2;
    }
    struct aquifer_region *region = aquifer_map(argv[1]);
    check(region == NULL, "mapping the region");
    struct aquifer_metadata metadata;
    check(aquifer_get_metadata(region, &metadata), "reading the metadata");
    uint64_t pages = metadata.size / AQUIFER_PAGE_SIZE;
    unsigned char *memory = aquifer_memory(region);

    /* Write every page, drop the first quarter, and halve the local cache. */
    for (uint64_t page = 0; page < pages; page++)
        memset(memory + page * AQUIFER_PAGE_SIZE, (int)(page % 255) + 1, AQUIFER_PAGE_SIZE);
    check(aquifer_drop(region, 0, pages / 4), "dropping pages");
    check(aquifer_cache_size(region, metadata.cache / 2), "resizing the cache");
    check(aquifer_persist(region), "writing back the region");

    uint8_t *states = malloc(pages);
    check(states == NULL, "allocating the states");
    check(aquifer_page_states(region, 0, pages, states), "reading the page states");
    uint64_t count[AQUIFER_PAGE_STATES] = {0};
    for (uint64_t page = 0; page < pages; page++)
        if (states[page] < AQUIFER_PAGE_STATES)
            count[states[page]]++;
    free(states);
    uint64_t wrong = 0;
    for (uint64_t byte = 0; byte < metadata.size; byte++) {
        uint64_t page = byte / AQUIFER_PAGE_SIZE;
        wrong += memory[byte] != (page < pages / 4 ? 0 : (int)(page % 255) + 1);
    }
    check(aquifer_get_metadata(region, &metadata), "reading the metadata");
    struct aquifer_extent extent;
    check(aquifer_extent(region, 0, &extent), "finding the first extent");
    printf("zero %llu remote %llu resident %llu dirty %llu shared %llu ",
           (unsigned long long)count[AQUIFER_ZERO], (unsigned long long)count[AQUIFER_REMOTE],
           (unsigned long long)count[AQUIFER_RESIDENT], (unsigned long long)count[AQUIFER_DIRTY],
           (unsigned long long)count[AQUIFER_SHARED]);
    printf("cache %llu wrong %llu at %s\n", (unsigned long long)metadata.cache,
           (unsigned long long)wrong, extent.address);
    if (aquifer_extent(region, metadata.extents, &extent) == 0)
        return 1;
    if (aquifer_open("/nothing/here") != NULL)
        return 1;
    aquifer_close(region);
    return wrong != 0;
}
