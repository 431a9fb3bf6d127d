/* Threads that read files into memory, demanded reads before speculative ones. native_reads.py is its only user.

   A job is the reads of one record. It has ended when none of its reads runs or will run any more; only then is the
   memory that they write to the caller's again. Nobody but a job's caller looks at it after that, so he may free it.

   One mutex guards all of a pool. It is never held while a file is read. */
#define _GNU_SOURCE
#include <errno.h>
#include <pthread.h>
#include <signal.h>
#include <stdint.h>
#include <stdlib.h>
#include <sys/time.h>
#include <unistd.h>

#define VERSION 1
#define NAME "experts"

/* As native_reads.py and ExpertIndex.table lay them out. */
typedef struct { int64_t file, offset, length, at; } part; /* of a file, to byte "at" of a target */
typedef struct {
  const int *descriptors, *direct; /* of each file; negative where it is not open, or not so */
  int64_t unit;                    /* direct reads start and end at multiples of it, in the file and in memory */
} files;

typedef struct job job;
typedef struct piece {
  struct piece* next;
  job* of;
  char* to;
  int64_t offset, length, file;
  int descriptor;
} piece;

struct job {
  int open;               /* pieces that have not ended; nothing of a job is written after this has become 0 */
  int error;              /* 0, an errno, ECANCELED, or ENDS_EARLY */
  int64_t file, at, left; /* where that was: the file's number, its byte, how many were still to be read */
  piece pieces[];
};
#define ENDS_EARLY (-1)

typedef struct { piece *first, **end; } list;

typedef struct {
  pthread_mutex_t lock;
  pthread_cond_t work, over;
  list demanded, speculative;
  int idle, alive, waiters, stopping, most_speculative, running_speculative, started;
  int unannounced; /* pieces that were queued without waking anybody */
  pthread_t threads[];
} pool;

/* What reads: bytes, 0 at the end of the file, or minus an errno. */
static int64_t read_file(int descriptor, void* to, uint64_t length, int64_t offset) {
  ssize_t count = pread(descriptor, to, length, offset);
  return count < 0 ? -errno : count;
}
typedef int64_t (*reads_function)(int, void*, uint64_t, int64_t);
reads_function reads_by = read_file; /* tests put slow and failing disks here */

static _Thread_local pool* mine; /* whose thread this is */

int reads_version(void) { return VERSION; }

static void clear(list* l) {
  l->first = NULL;
  l->end = &l->first;
}

static void append(list* l, piece* p) {
  p->next = NULL;
  *l->end = p;
  l->end = &p->next;
}

static piece* pop(list* l) {
  piece* p = l->first;
  if (p && !(l->first = p->next)) l->end = &l->first;
  return p;
}

/* A job's pieces, taken out of a list; they keep their order, as the others do. */
static piece* take_job(list* l, job* j) {
  list taken, left;
  clear(&taken);
  clear(&left);
  for (piece* p; (p = pop(l));) append(p->of == j ? &taken : &left, p);
  *l = left;
  if (!left.first) clear(l);
  return taken.first;
}

/* With the lock held: one of a job's pieces has ended. The job may be gone afterwards. */
static void close_piece(pool* all, job* j) {
  if (__atomic_sub_fetch(&j->open, 1, __ATOMIC_ACQ_REL) == 0 && all->waiters) pthread_cond_broadcast(&all->over);
}

static void fail(job* j, int error, const piece* p, int64_t done) {
  if (j->error) return;
  j->error = error;
  j->file = p->file;
  j->at = p->offset + done;
  j->left = p->length - done;
}

static void drop(pool* all, piece* p) {
  for (piece* next; p; p = next) {
    next = p->next;
    fail(p->of, ECANCELED, p, 0);
    close_piece(all, p->of);
  }
}

static int read_whole(const piece* p, int64_t* done) {
  for (*done = 0; *done < p->length;) {
    int64_t count = reads_by(p->descriptor, p->to + *done, p->length - *done, p->offset + *done);
    if (count == -EINTR) continue;
    if (count <= 0) return count ? -count : ENDS_EARLY;
    *done += count;
  }
  return 0;
}

static void* work(void* argument) {
  pool* all = argument;
#ifdef __APPLE__
  pthread_setname_np(NAME);
#else
  pthread_setname_np(pthread_self(), NAME);
#endif
  mine = all;
  pthread_mutex_lock(&all->lock);
  for (;;) {
    int speculative = 0;
    piece* p = pop(&all->demanded);
    if (!p && all->running_speculative < all->most_speculative && (p = pop(&all->speculative))) speculative = 1;
    if (!p) {
      if (all->stopping) break;
      ++all->idle;
      pthread_cond_wait(&all->work, &all->lock);
      --all->idle;
      continue;
    }
    job* j = p->of;
    all->running_speculative += speculative;
    if (!j->error) {
      int64_t done;
      pthread_mutex_unlock(&all->lock);
      int error = read_whole(p, &done);
      pthread_mutex_lock(&all->lock);
      if (error) fail(j, error, p, done);
    }
    all->running_speculative -= speculative;
    close_piece(all, j);
  }
  --all->alive;
  pthread_cond_broadcast(&all->over);
  pthread_mutex_unlock(&all->lock);
  return NULL;
}

static void set_deadline(struct timespec* t, int milliseconds) {
  struct timeval now;
  gettimeofday(&now, NULL);
  int64_t ns = now.tv_usec * 1000LL + milliseconds * 1000000LL;
  t->tv_sec = now.tv_sec + ns / 1000000000;
  t->tv_nsec = ns % 1000000000;
}

/* A pool stands in *made. It has fewer threads than asked for where the system has no more; an errno where it has none. */
int reads_open(int threads, int most_speculative, pool** made) {
  pool* all = calloc(1, sizeof(pool) + threads * sizeof(pthread_t));
  if (!all) return ENOMEM;
  pthread_mutex_init(&all->lock, NULL);
  pthread_cond_init(&all->work, NULL);
  pthread_cond_init(&all->over, NULL);
  clear(&all->demanded);
  clear(&all->speculative);
  all->most_speculative = most_speculative;
  sigset_t every, before; /* signals are for the threads that run Python */
  sigfillset(&every);
  pthread_sigmask(SIG_SETMASK, &every, &before);
  pthread_mutex_lock(&all->lock);
  while (all->started < threads && !pthread_create(&all->threads[all->started], NULL, work, all)) ++all->started;
  all->alive = all->started;
  pthread_mutex_unlock(&all->lock);
  pthread_sigmask(SIG_SETMASK, &before, NULL);
  if (all->started) {
    *made = all;
    return 0;
  }
  free(all);
  return EAGAIN;
}

static void signal_idle(pool* all, int pieces) {
  for (int i = pieces < all->idle ? pieces : all->idle; i > 0; --i) pthread_cond_signal(&all->work);
}

static int is_multiple(const files* f, int64_t number) { return number % f->unit == 0; }

/* Which descriptor reads so much from there to there; negative where it is not open. Tails are not read directly. */
static int descriptor(const files* f, int64_t file, int64_t offset, const char* to, int64_t length) {
  int direct = f->direct[file];
  if (direct < 0 || !is_multiple(f, length)) return f->descriptors[file];
  return is_multiple(f, offset) && is_multiple(f, (intptr_t)to) ? direct : -1;
}

/* Queue a new job, which reads parts to their places in "target", in pieces of at most so many bytes. It stands in
   *made before any of it is read, and the caller frees it once it has ended.
   wake: or leave it to threads that are awake, until reads_wake.
   Returns 0, an errno, or minus the number of a part, counted from one, whose file is not open as it should be. */
int reads_add(pool* all, const files* f, const part* parts, int count, char* target, int64_t most, int demanded,
              int wake, job** made) {
  int pieces = 0;
  for (int i = 0; i < count; ++i) pieces += (parts[i].length + most - 1) / most;
  job* j = calloc(1, sizeof(job) + pieces * sizeof(piece));
  if (!j) return ENOMEM;
  piece* next = j->pieces;
  for (int i = 0; i < count; ++i) {
    const part* p = &parts[i];
    for (int64_t start = 0; start < p->length; start += most, ++next) {
      next->of = j;
      next->file = p->file;
      next->to = target + p->at + start;
      next->offset = p->offset + start;
      next->length = p->length - start < most ? p->length - start : most;
      next->descriptor = descriptor(f, p->file, next->offset, next->to, next->length);
      if (next->descriptor < 0) {
        free(j);
        return -i - 1;
      }
    }
  }
  j->open = pieces;
  *made = j;
  pthread_mutex_lock(&all->lock);
  for (int i = 0; i < pieces; ++i) append(demanded ? &all->demanded : &all->speculative, &j->pieces[i]);
  if (wake)
    signal_idle(all, pieces);
  else
    all->unannounced += pieces;
  pthread_mutex_unlock(&all->lock);
  return 0;
}

void reads_wake(pool* all) {
  pthread_mutex_lock(&all->lock);
  signal_idle(all, all->unannounced);
  all->unannounced = 0;
  pthread_mutex_unlock(&all->lock);
}

/* What waits of a speculative job goes behind the demanded ones. */
void reads_promote(pool* all, job* j) {
  pthread_mutex_lock(&all->lock);
  int moved = 0;
  for (piece *p = take_job(&all->speculative, j), *next; p; p = next, ++moved) {
    next = p->next;
    append(&all->demanded, p);
  }
  signal_idle(all, moved);
  pthread_mutex_unlock(&all->lock);
}

/* What waits of a job will not run. */
void reads_cancel(pool* all, job* j) {
  pthread_mutex_lock(&all->lock);
  drop(all, take_job(&all->speculative, j));
  drop(all, take_job(&all->demanded, j));
  pthread_mutex_unlock(&all->lock);
}

int reads_ended(job* j) { return __atomic_load_n(&j->open, __ATOMIC_ACQUIRE) == 0; }

/* Until a job has ended, or no longer than that; whether it has. */
int reads_wait(pool* all, job* j, int milliseconds) {
  if (reads_ended(j)) return 1; /* then the pool may be gone */
  struct timespec until;
  set_deadline(&until, milliseconds);
  pthread_mutex_lock(&all->lock);
  ++all->waiters;
  while (!reads_ended(j) && !pthread_cond_timedwait(&all->over, &all->lock, &until)) {
  }
  --all->waiters;
  pthread_mutex_unlock(&all->lock);
  return reads_ended(j);
}

/* Of an ended job: 0, an errno, or ENDS_EARLY; and where that was: the file's number, its byte, how many were left. */
int reads_error(job* j, int64_t* where) {
  where[0] = j->file;
  where[1] = j->at;
  where[2] = j->left;
  return j->error;
}

/* A job that has ended. */
void reads_free(job** made) {
  job* j = *made;
  *made = NULL;
  free(j);
}

/* Whether this is a thread of the pool; only tests run anything there that may ask. */
int reads_inside(pool* all) { return mine == all; }

/* Drop what has not begun and have the threads end; wait for that, but no longer. Whether they have. */
int reads_stop(pool* all, int milliseconds) {
  struct timespec until;
  set_deadline(&until, milliseconds);
  pthread_mutex_lock(&all->lock);
  all->stopping = 1;
  piece *demanded = all->demanded.first, *speculative = all->speculative.first;
  clear(&all->demanded);
  clear(&all->speculative);
  drop(all, demanded);
  drop(all, speculative);
  pthread_cond_broadcast(&all->work);
  int late = 0;
  while ((all->alive || all->waiters) && !late) late = pthread_cond_timedwait(&all->over, &all->lock, &until);
  int ended = !all->alive && !all->waiters;
  pthread_mutex_unlock(&all->lock);
  return ended;
}

/* A pool whose threads have ended. */
void reads_close(pool** made) {
  pool* all = *made;
  *made = NULL;
  for (int i = 0; i < all->started; ++i) pthread_join(all->threads[i], NULL);
  pthread_cond_destroy(&all->work);
  pthread_cond_destroy(&all->over);
  pthread_mutex_destroy(&all->lock);
  free(all);
}
