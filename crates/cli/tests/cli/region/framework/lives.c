/* Maps a region by the library and obeys orders: `lives FILE [lock]`. With `lock` it locks all its
 * memory, present and future.
 *
 * write SEED | check SEED         all pages
 * some SEED COUNT | see SEED COUNT the first pages
 * close SEED TIMES                writes all pages while TIMES children in turn close the region
 * stay                            forks a child that outlives it for a minute; answers its process
 * remove FIRST COUNT              madvise(MADV_REMOVE); answers the error's number
 * unlock FIRST COUNT              the same, after all memory was unlocked
 * zero FIRST COUNT                whether these pages read as zeroes
 */
#define _GNU_SOURCE
#include <aquifer.h>
#include <errno.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

static struct aquifer_region *region;
static volatile unsigned char *memory;
static uint64_t pages;

static uint64_t word(uint64_t seed, uint64_t page) {
    return seed << 32 | (page + 1);
}

static void put(uint64_t seed, uint64_t count) {
    for (uint64_t page = 0; page < count; page++)
        for (uint64_t at = 0; at < AQUIFER_PAGE_SIZE; at += 512)
            *(volatile uint64_t *)(memory + page * AQUIFER_PAGE_SIZE + at) = word(seed, page);
}

static uint64_t wrong(uint64_t seed, uint64_t count) {
    uint64_t wrong = 0;
    for (uint64_t page = 0; page < count; page++) {
        int differs = 0;
        for (uint64_t at = 0; at < AQUIFER_PAGE_SIZE; at += 512)
            differs |= *(volatile uint64_t *)(memory + page * AQUIFER_PAGE_SIZE + at)
                != word(seed, page);
        wrong += differs;
    }
    return wrong;
}

static uint64_t filled(uint64_t first, uint64_t count) {
    uint64_t filled = 0;
    uint64_t end = (first + count) * AQUIFER_PAGE_SIZE;
    for (uint64_t at = first * AQUIFER_PAGE_SIZE; at < end; at += 512)
        filled += *(volatile uint64_t *)(memory + at) != 0;
    return filled;
}

static void *writer(void *seed) {
    put((uint64_t)(uintptr_t)seed, pages);
    return NULL;
}

static uint64_t closing(uint64_t seed, uint64_t times) {
    uint64_t wrong = 0;
    pthread_t thread;
    pthread_create(&thread, NULL, writer, (void *)(uintptr_t)seed);
    while (times--) {
        int status;
        pid_t child = fork();
        if (child == 0) {
            aquifer_close(region);
            _exit(0);
        }
        wrong += waitpid(child, &status, 0) != child || status != 0;
    }
    pthread_join(thread, NULL);
    return wrong;
}

static uint64_t staying(void) {
    pid_t child = fork();
    if (child == 0) {
        close(1);
        sleep(60);
        _exit(0);
    }
    return (uint64_t)child;
}

static uint64_t removed(uint64_t first, uint64_t count) {
    void *at = (void *)(memory + first * AQUIFER_PAGE_SIZE);
    return madvise(at, count * AQUIFER_PAGE_SIZE, MADV_REMOVE) ? (uint64_t)errno : 0;
}

int main(int argc, char **argv) {
    struct aquifer_metadata metadata;
    char order[16], line[128];
    if (argc > 2 && mlockall(MCL_CURRENT | MCL_FUTURE)) {
        perror("mlockall");
        return 1;
    }
    region = aquifer_map(argv[1]);
    if (region == NULL || aquifer_get_metadata(region, &metadata)) {
        fprintf(stderr, "%s\n", aquifer_error());
        return 1;
    }
    memory = aquifer_memory(region);
    pages = metadata.size / AQUIFER_PAGE_SIZE;
    puts("ready");
    fflush(stdout);
    while (fgets(line, sizeof line, stdin)) {
        unsigned long long one = 0, two = 0, answer = 0;
        if (sscanf(line, "%15s %llu %llu", order, &one, &two) < 1)
            return 1;
        if (!strcmp(order, "write"))
            put(one, pages);
        else if (!strcmp(order, "check"))
            answer = wrong(one, pages);
        else if (!strcmp(order, "some"))
            put(one, two);
        else if (!strcmp(order, "see"))
            answer = wrong(one, two);
        else if (!strcmp(order, "close"))
            answer = closing(one, two);
        else if (!strcmp(order, "stay"))
            answer = staying();
        else if (!strcmp(order, "remove"))
            answer = removed(one, two);
        else if (!strcmp(order, "unlock"))
            answer = munlockall() ? (unsigned long long)errno : removed(one, two);
        else if (!strcmp(order, "zero"))
            answer = filled(one, two);
        else
            return 1;
        printf("%s %llu\n", order, answer);
        fflush(stdout);
    }
    aquifer_close(region);
    return 0;
}
