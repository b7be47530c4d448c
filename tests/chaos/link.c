/* Joins network namespaces: forwards IPv4 packets between TUN devices, late, not all, or not at all.
 *
 *   link FD:ADDRESS FD:ADDRESS ...
 *
 * FD is an open TUN device (no packet information) of the host that has ADDRESS. Each ordered pair
 * of hosts has a delay, a loss and a switch, set by lines on stdin, each answered by "ok":
 *
 *   FROM TO DELAY_US LOSS_PER_MILLION CUT SEED
 *
 * FROM and TO are the hosts' numbers. Packets of a pair never overtake each other. What is cut is
 * dropped without a word, packets under way included: nobody gets a reset. Ends when stdin does.
 */

#define _GNU_SOURCE
#include <arpa/inet.h>
#include <errno.h>
#include <poll.h>
#include <sched.h>
#include <signal.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <time.h>
#include <unistd.h>

#define MAX_HOSTS 32
#define MAX_PACKET 65536
#define MAX_WAITING 65536 /* packets under way; more are dropped, as a full router does */

typedef struct {
  uint64_t delay_ns, last_due;
  uint32_t loss_per_million;
  int cut;
  uint64_t random;
} Pair;

typedef struct {
  uint64_t due, number;
  int from, to, size;
  uint8_t *data;
} Packet;

static struct { int fd; uint32_t address; } hosts[MAX_HOSTS];
static int num_hosts;
static Pair pairs[MAX_HOSTS][MAX_HOSTS];
static Packet waiting[MAX_WAITING]; /* a heap, the earliest first */
static int num_waiting;
static uint64_t num_packets;

static uint64_t now_ns(void) {
  struct timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return (uint64_t)t.tv_sec * 1000000000u + (uint64_t)t.tv_nsec;
}

static int is_earlier(const Packet *one, const Packet *other) {
  return one->due != other->due ? one->due < other->due : one->number < other->number;
}

static void swap(int one, int other) {
  Packet kept = waiting[one];
  waiting[one] = waiting[other];
  waiting[other] = kept;
}

static void push(Packet packet) {
  int at = num_waiting++;
  waiting[at] = packet;
  for (; at > 0 && is_earlier(&waiting[at], &waiting[(at - 1) / 2]); at = (at - 1) / 2)
    swap(at, (at - 1) / 2);
}

static Packet pop(void) {
  Packet first = waiting[0];
  waiting[0] = waiting[--num_waiting];
  for (int at = 0;;) {
    int least = at;
    for (int child = 2 * at + 1; child <= 2 * at + 2; child++)
      if (child < num_waiting && is_earlier(&waiting[child], &waiting[least])) least = child;
    if (least == at) return first;
    swap(at, least);
    at = least;
  }
}

static int is_lost(Pair *pair) {
  pair->random ^= pair->random << 13; /* xorshift64 */
  pair->random ^= pair->random >> 7;
  pair->random ^= pair->random << 17;
  return pair->random % 1000000u < pair->loss_per_million;
}

/* A full or absent device drops the packet, as networks do. */
static void deliver(int to, const uint8_t *data, int size) {
  if (write(hosts[to].fd, data, (size_t)size) < 0 && errno == EBADF) exit(1);
}

static void take(int from, const uint8_t *data, int size) {
  uint32_t address;
  if (size < 20 || data[0] >> 4 != 4) return;
  memcpy(&address, data + 16, 4);
  for (int to = 0; to < num_hosts; to++) {
    if (hosts[to].address != address) continue;
    Pair *pair = &pairs[from][to];
    if (pair->cut || (pair->loss_per_million && is_lost(pair))) return;
    uint64_t due = now_ns() + pair->delay_ns;
    if (due < pair->last_due) due = pair->last_due;
    if (!pair->delay_ns && due != pair->last_due) {
      deliver(to, data, size);
      return;
    }
    if (num_waiting == MAX_WAITING) return;
    uint8_t *copy = malloc((size_t)size);
    if (!copy) return;
    memcpy(copy, data, (size_t)size);
    pair->last_due = due;
    push((Packet){due, num_packets++, from, to, size, copy});
    return;
  }
}

static void deliver_due(void) {
  while (num_waiting && waiting[0].due <= now_ns()) {
    Packet packet = pop();
    if (!pairs[packet.from][packet.to].cut) deliver(packet.to, packet.data, packet.size);
    free(packet.data);
  }
}

static void obey(char *line) {
  int from, to, cut;
  unsigned long delay_us, loss;
  unsigned long long seed;
  int fields = sscanf(line, "%d %d %lu %lu %d %llu", &from, &to, &delay_us, &loss, &cut, &seed);
  if (fields != 6 || from < 0 || to < 0 || from >= num_hosts || to >= num_hosts) {
    fprintf(stderr, "not understood: %s\n", line);
    exit(2);
  }
  Pair *pair = &pairs[from][to];
  pair->delay_ns = delay_us * 1000u;
  pair->loss_per_million = (uint32_t)loss;
  pair->cut = cut;
  pair->random = seed * 2 + 1; /* never 0 */
  puts("ok");
  fflush(stdout);
}

static void read_orders(void) {
  static char text[1 << 16];
  static size_t length;
  ssize_t size = read(STDIN_FILENO, text + length, sizeof text - 1 - length);
  if (size <= 0) exit(0);
  length += (size_t)size;
  char *line = text, *end;
  while ((end = memchr(line, '\n', length - (size_t)(line - text)))) {
    *end = 0;
    obey(line);
    line = end + 1;
  }
  length -= (size_t)(line - text);
  memmove(text, line, length);
}

static void forward(void) {
  static uint8_t data[MAX_PACKET];
  struct pollfd polled[MAX_HOSTS + 1];
  for (int i = 0; i < num_hosts; i++) polled[i] = (struct pollfd){hosts[i].fd, POLLIN, 0};
  polled[num_hosts] = (struct pollfd){STDIN_FILENO, POLLIN, 0};
  for (;;) {
    struct timespec wait, *limit = NULL;
    if (num_waiting) {
      uint64_t now = now_ns(), due = waiting[0].due, left = due > now ? due - now : 0;
      wait = (struct timespec){(time_t)(left / 1000000000u), (long)(left % 1000000000u)};
      limit = &wait;
    }
    if (ppoll(polled, (nfds_t)num_hosts + 1, limit, NULL) < 0 && errno != EINTR) exit(1);
    deliver_due();
    for (int i = 0; i < num_hosts; i++) {
      if (!(polled[i].revents & POLLIN)) continue;
      for (int left = 64; left > 0; left--) {
        ssize_t size = read(hosts[i].fd, data, sizeof data);
        if (size <= 0) break;
        take(i, data, (int)size);
      }
      deliver_due();
    }
    if (polled[num_hosts].revents) read_orders();
  }
}

int main(int argc, char **argv) {
  prctl(PR_SET_PDEATHSIG, SIGKILL);
  prctl(PR_SET_TIMERSLACK, 1ul); /* ns; the default is 50 us */
  /* Before whatever it joins: it computes next to nothing, and delays are to be what they say. */
  sched_setscheduler(0, SCHED_FIFO, &(struct sched_param){.sched_priority = 1});
  for (int i = 1; i < argc && num_hosts < MAX_HOSTS; i++) {
    char address[64];
    if (sscanf(argv[i], "%d:%63s", &hosts[num_hosts].fd, address) != 2) return 2;
    if (inet_pton(AF_INET, address, &hosts[num_hosts].address) != 1) return 2;
    num_hosts++;
  }
  for (int i = 0; i < MAX_HOSTS; i++)
    for (int j = 0; j < MAX_HOSTS; j++) pairs[i][j].random = (uint64_t)(i * MAX_HOSTS + j) * 2 + 1;
  forward();
}
