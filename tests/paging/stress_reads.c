/* Random use of reads.c for some seconds, for a compiler's sanitizers: stress FILE SECONDS -> jobs, or what was wrong. */
#include SOURCE
#include <fcntl.h>
#include <stdio.h>
#include <string.h>
#include <time.h>

#define JOBS 32
#define MOST 20000

typedef struct {
  job* is;
  char* to;
  part parts[3];
  int count;
} entry;

int main(int argc, char** argv) {
  if (argc < 3) return 2;
  int descriptor = open(argv[1], O_RDONLY), none = -1;
  off_t size = lseek(descriptor, 0, SEEK_END);
  char* want = malloc(size);
  if (pread(descriptor, want, size, 0) != size) return 2;
  files all = {&descriptor, &none, 1};
  long jobs = 0;
  srand(1);
  for (time_t end = time(NULL) + atoi(argv[2]); time(NULL) < end;) {
    pool* p = NULL;
    int threads = 1 + rand() % 12;
    if (reads_open(threads, threads - threads / 4, &p)) return printf("no threads\n"), 1;
    for (int round = 0; round < 20; ++round) {
      entry entries[JOBS];
      for (int i = 0; i < JOBS; ++i) {
        entry* e = &entries[i];
        e->is = NULL;
        e->count = 1 + rand() % 3;
        int64_t at = 0;
        for (int k = 0; k < e->count; ++k) {
          int64_t length = 1 + rand() % MOST;
          e->parts[k] = (part){0, rand() % (size - length + 50), length, at};
          at += length;
        }
        e->to = malloc(at);
        int code = reads_add(p, &all, e->parts, e->count, e->to, 1 + rand() % MOST, rand() % 2, rand() % 2, &e->is);
        if (code) return printf("job %ld: %d\n", jobs + i, code), 1;
        if (rand() % 4 == 0) reads_cancel(p, entries[rand() % (i + 1)].is);
        if (rand() % 4 == 0) reads_promote(p, entries[rand() % (i + 1)].is);
      }
      if (rand() % 2) reads_wake(p);
      int stopped = round == 19 || rand() % 50 == 0;
      if (stopped)
        while (!reads_stop(p, 1)) {
        }
      else
        reads_wake(p);
      for (int i = 0; i < JOBS; ++i, ++jobs) {
        entry* e = &entries[i];
        while (!reads_wait(p, e->is, 5)) {
        }
        int64_t where[3];
        int error = reads_error(e->is, where);
        if (error == ENDS_EARLY ? where[1] < size : error && error != ECANCELED) return printf("error %d\n", error), 1;
        for (int k = 0; !error && k < e->count; ++k)
          if (memcmp(e->to + e->parts[k].at, want + e->parts[k].offset, e->parts[k].length))
            return printf("other bytes at %ld\n", (long)e->parts[k].offset), 1;
        reads_free(&e->is);
        free(e->to);
      }
      if (stopped) break;
    }
    while (!reads_stop(p, 1)) {
    }
    reads_close(&p);
  }
  free(want);
  printf("%ld jobs\n", jobs);
  return 0;
}
