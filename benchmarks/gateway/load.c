/* Load on one gateway: streamed chats over keep-alive connections, checked to the last token.
 *
 *   load PORT BODY CONNECTIONS SECONDS TOKENS [REQUESTS_PER_SECOND]   ->   one JSON object on stdout
 *
 * Closed loop: each connection sends its next request when the last is answered. With a rate: requests start at
 * fixed intervals on whatever connection is free; where none is, the request is counted as unsent. Each base64 image gets twelve fresh characters per request, so
 * that nothing can be cached. Every token carries the time at which its instance sent it (stage.c).
 */
#define _GNU_SOURCE
#include <arpa/inet.h>
#include <errno.h>
#include <fcntl.h>
#include <netinet/tcp.h>
#include <signal.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <strings.h>
#include <sys/epoll.h>
#include <sys/socket.h>
#include <sys/uio.h>
#include <time.h>
#include <unistd.h>

#define IMAGES 32
#define FRESH 12
#define SAMPLES (1 << 22)

typedef struct {
  int fd, active, writing;
  char head[512], fresh[IMAGES][FRESH];
  struct iovec parts[2 * IMAGES + 2];
  int num_parts, part;
  char *raw, *text; /* as received; without chunk framing */
  size_t raw_size, raw_capacity, at, text_size, text_capacity, scanned;
  long chunk; /* bytes left of the current chunk; -1: its size line comes next */
  int status, chunked, tokens;
  long length;
  int64_t sent, first;
} Client;

static int poller, port, expected, num_images, num_clients, in_flight;
static char *body;
static size_t body_size, image_at[IMAGES];
static uint64_t sequence;
static long num_ok, num_failed, num_delays, num_done;
static double *delays, *ttfts, *latencies;
static int64_t end_at;
static char first_failure[300];
static int open_loop;

static int64_t now(void) {
  struct timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return t.tv_sec * 1000000000LL + t.tv_nsec;
}

static void watch(Client *client, int operation, int writing) {
  struct epoll_event event = {.events = EPOLLIN | (writing ? EPOLLOUT : 0), .data.ptr = client};
  client->writing = writing;
  epoll_ctl(poller, operation, client->fd, &event);
}

static void dial(Client *client) {
  int one = 1;
  struct sockaddr_in address = {.sin_family = AF_INET, .sin_port = htons(port), .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
  client->fd = socket(AF_INET, SOCK_STREAM, 0);
  if (connect(client->fd, (void *)&address, sizeof address)) { perror("connect"); exit(1); }
  setsockopt(client->fd, IPPROTO_TCP, TCP_NODELAY, &one, sizeof one);
  fcntl(client->fd, F_SETFL, O_NONBLOCK);
  watch(client, EPOLL_CTL_ADD, 0);
}

static void write_on(Client *client) {
  while (client->part < client->num_parts) {
    ssize_t sent = writev(client->fd, client->parts + client->part, client->num_parts - client->part);
    if (sent < 0) {
      if (errno == EAGAIN && !client->writing) watch(client, EPOLL_CTL_MOD, 1);
      return;
    }
    while (sent) {
      struct iovec *part = &client->parts[client->part];
      size_t taken = (size_t)sent < part->iov_len ? (size_t)sent : part->iov_len;
      part->iov_base = (char *)part->iov_base + taken;
      part->iov_len -= taken;
      sent -= taken;
      if (!part->iov_len) client->part++;
    }
  }
  if (client->writing) watch(client, EPOLL_CTL_MOD, 0);
}

static void start(Client *client, int64_t at) {
  static const char base64[] = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";
  if (client->fd < 0) dial(client);
  int size = snprintf(client->head, sizeof client->head,
                      "POST /v1/chat/completions HTTP/1.1\r\nHost: 127.0.0.1:%d\r\nContent-Type: application/json\r\n"
                      "Accept: */*\r\nUser-Agent: load\r\nAuthorization: Bearer benchmark\r\nContent-Length: %zu\r\n\r\n",
                      port, body_size);
  size_t from = 0;
  int n = 0;
  client->parts[n++] = (struct iovec){client->head, size};
  for (int i = 0; i < num_images; i++) {
    uint64_t bits = ++sequence * 0x9E3779B97F4A7C15ULL;
    for (int k = 0; k < FRESH; k++) client->fresh[i][k] = base64[(bits >> (k * 5)) & 63];
    client->parts[n++] = (struct iovec){body + from, image_at[i] - from};
    client->parts[n++] = (struct iovec){client->fresh[i], FRESH};
    from = image_at[i] + FRESH;
  }
  client->parts[n++] = (struct iovec){body + from, body_size - from};
  client->num_parts = n;
  client->part = 0;
  client->raw_size = client->at = client->text_size = client->scanned = 0;
  client->status = client->chunked = client->tokens = 0;
  client->chunk = client->length = -1;
  client->first = 0;
  client->sent = at;
  client->active = 1;
  in_flight++;
  write_on(client);
}

static void finish(Client *client, int close_it) {
  int64_t time = now();
  int done = client->text_size > 12 && memmem(client->text + client->text_size - 12, 12, "[DONE]", 6) != NULL;
  client->active = 0;
  in_flight--;
  if (client->status == 200 && done && client->tokens == expected) {
    num_ok++;
    if (num_done < SAMPLES) {
      ttfts[num_done] = (client->first - client->sent) / 1e6;
      latencies[num_done++] = (time - client->sent) / 1e6;
    }
  } else {
    num_failed++;
    if (!first_failure[0])
      snprintf(first_failure, sizeof first_failure, "status %d, %d tokens: %.*s", client->status, client->tokens,
               (int)(client->text_size < 200 ? client->text_size : 200), client->text ? client->text : "");
  }
  if (close_it) { close(client->fd); client->fd = -1; }
  if (!open_loop && time < end_at) start(client, now());
}

static void scan(Client *client) { /* the tokens that are there; the text ends with a 0 byte */
  int64_t time = now();
  char *at;
  client->text[client->text_size] = 0;
  while ((at = memmem(client->text + client->scanned, client->text_size - client->scanned, "\" tok ", 6))) {
    if (client->text + client->text_size < at + 6 + 19) return;
    if (!client->first) client->first = time;
    client->tokens++;
    if (num_delays < SAMPLES) delays[num_delays++] = (time - atoll(at + 6)) / 1e6;
    client->scanned = at + 6 + 19 - client->text;
  }
}

static void parse(Client *client) {
  if (!client->at) {
    char *end = memmem(client->raw, client->raw_size, "\r\n\r\n", 4), *found;
    if (!end) return;
    *end = 0;
    client->status = atoi(client->raw + 9);
    if ((found = strcasestr(client->raw, "\r\ncontent-length:"))) client->length = atol(found + 17);
    client->chunked = strcasestr(client->raw, "\r\ntransfer-encoding:") != NULL;
    client->at = end + 4 - client->raw;
  }
  if (client->text_capacity < client->raw_size + 1) client->text = realloc(client->text, client->text_capacity = client->raw_size * 2 + 1);
  if (!client->chunked) {
    client->text_size = client->raw_size - client->at;
    memcpy(client->text, client->raw + client->at, client->text_size);
    if ((long)client->text_size >= client->length && client->length >= 0) finish(client, 0);
    return;
  }
  for (;;) {
    size_t there = client->raw_size - client->at;
    if (client->chunk < 0) {
      char *end = memmem(client->raw + client->at, there, "\r\n", 2);
      if (!end) break;
      client->chunk = strtol(client->raw + client->at, NULL, 16) + 2;
      client->at = end + 2 - client->raw;
      if (client->chunk == 2) { scan(client); finish(client, 0); return; }
      continue;
    }
    if (!there) break;
    size_t taken = (long)there < client->chunk ? there : (size_t)client->chunk;
    size_t payload = client->chunk > 2 ? (taken < (size_t)client->chunk - 2 ? taken : (size_t)client->chunk - 2) : 0;
    memcpy(client->text + client->text_size, client->raw + client->at, payload);
    client->text_size += payload;
    client->at += taken;
    client->chunk -= taken;
    if (!client->chunk) client->chunk = -1;
  }
  scan(client);
}

static void readable(Client *client) {
  if (client->raw_capacity - client->raw_size < 65536) client->raw = realloc(client->raw, client->raw_capacity = client->raw_capacity * 2 + 131072);
  ssize_t got = recv(client->fd, client->raw + client->raw_size, client->raw_capacity - client->raw_size - 1, 0);
  if (got < 0 && errno == EAGAIN) return;
  if (got <= 0) {
    if (client->active) finish(client, 1);
    else { close(client->fd); client->fd = -1; }
    return;
  }
  client->raw_size += got;
  client->raw[client->raw_size] = 0;
  if (client->active) parse(client);
}

static int ascending(const void *a, const void *b) {
  double x = *(const double *)a, y = *(const double *)b;
  return (x > y) - (x < y);
}

static double quantile(double *values, long count, double q) { return count ? values[(long)(q * (count - 1) + 0.5)] : -1; }

int main(int argc, char **argv) {
  signal(SIGPIPE, SIG_IGN);
  port = atoi(argv[1]);
  FILE *file = fopen(argv[2], "rb");
  if (!file) { perror(argv[2]); return 1; }
  fseek(file, 0, SEEK_END);
  body_size = ftell(file);
  rewind(file);
  body = malloc(body_size + 1);
  if (fread(body, 1, body_size, file) != body_size) return 1;
  num_clients = atoi(argv[3]);
  double seconds = atof(argv[4]), rate = argc > 6 ? atof(argv[6]) : 0;
  expected = atoi(argv[5]);
  open_loop = rate > 0;
  /* behind the file's header, so that what is seen of the picture stays as it is */
  for (char *at = body; num_images < IMAGES && (at = memmem(at, body + body_size - at, ";base64,", 8)); at += 8)
    image_at[num_images++] = at + 8 + 4000 - body;
  poller = epoll_create1(0);
  delays = malloc(SAMPLES * sizeof *delays);
  ttfts = malloc(SAMPLES * sizeof *ttfts);
  latencies = malloc(SAMPLES * sizeof *latencies);
  Client *clients = calloc(num_clients, sizeof *clients);
  for (int i = 0; i < num_clients; i++) { clients[i].fd = -1; dial(&clients[i]); }
  int64_t begin = now(), next = begin, step = rate > 0 ? (int64_t)(1e9 / rate) : 0;
  int dropped = 0, most = 0;
  end_at = begin + (int64_t)(seconds * 1e9);
  if (!open_loop) for (int i = 0; i < num_clients; i++) start(&clients[i], now());
  while (in_flight || (open_loop && now() < end_at)) {
    int64_t time = now();
    if (time > end_at + 30000000000LL) break;
    for (int i = 0; open_loop && next <= time && next < end_at; next += step) {
      while (i < num_clients && clients[i].active) i++;
      if (i < num_clients) start(&clients[i], next); else dropped++;
    }
    if (in_flight > most) most = in_flight;
    int64_t wait = open_loop && next < end_at ? next - now() : 1000000000;
    struct timespec limit = {wait > 0 ? wait / 1000000000 : 0, wait > 0 ? wait % 1000000000 : 0};
    struct epoll_event events[256];
    int ready = epoll_pwait2(poller, events, 256, &limit, NULL);
    for (int i = 0; i < ready; i++) {
      Client *client = events[i].data.ptr;
      if (events[i].events & EPOLLOUT) write_on(client);
      if (events[i].events & ~EPOLLOUT) readable(client);
    }
  }
  double elapsed = (now() - begin) / 1e9;
  num_failed += in_flight; /* without an end after half a minute */
  qsort(delays, num_delays, sizeof *delays, ascending);
  qsort(ttfts, num_done, sizeof *ttfts, ascending);
  qsort(latencies, num_done, sizeof *latencies, ascending);
  for (char *p = first_failure; *p; p++) if (*p == '"' || *p == '\\' || (unsigned char)*p < 32) *p = ' ';
  printf("{\"ok\": %ld, \"failed\": %ld, \"unsent\": %d, \"seconds\": %.3f, \"most_in_flight\": %d, \"ttft_p50_ms\": %.3f, \"ttft_p99_ms\": %.3f, "
         "\"latency_p50_ms\": %.3f, \"delay_p50_ms\": %.3f, \"delay_p99_ms\": %.3f, \"failure\": \"%s\"}\n",
         num_ok, num_failed, dropped, elapsed, most, quantile(ttfts, num_done, .5), quantile(ttfts, num_done, .99),
         quantile(latencies, num_done, .5), quantile(delays, num_delays, .5), quantile(delays, num_delays, .99), first_failure);
  return 0;
}
