/* Stage instances that cost next to nothing: one epoll thread plays E, P and D on several ports.
 *
 *   stage DIRECTORY TOKENS E:PORT P:PORT D:PORT ...
 *
 * They speak the wire protocol of epd-serve (/stage/..., /info) and vLLM's (/v1/chat/completions). What they answer
 * lies in DIRECTORY, ready to be sent (answers.py writes it); a run of '@' in an event is replaced by the time at
 * which the event leaves, in nanoseconds of CLOCK_MONOTONIC. GET /gap/N sets the milliseconds between tokens.
 * As with real instances, P answers when every image of its request has been encoded, and D when P has; and
 * /reports names the calls that have come, five times a second, and up to fifty times where there are any.
 */
#define _GNU_SOURCE
#include <arpa/inet.h>
#include <errno.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <signal.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <strings.h>
#include <sys/epoll.h>
#include <sys/socket.h>
#include <time.h>
#include <unistd.h>

#define STAMP 19
#define TABLE (1 << 16)
#define REPORT_NS 180000000LL
#define LEAST_REPORT_NS 20000000LL

typedef struct { char *data; size_t size; char *stamp; } Blob;

typedef struct Request { /* one request of epd-serve, joined by its id */
  char id[96];
  int encoded, images, prefilled;
  struct Conn *prefill, *decode;
  struct Request *next;
} Request;

typedef struct Conn {
  int fd, port, listening, closed, streaming;
  char role;
  char *in;
  size_t size, capacity, head, need;
  int left; /* tokens to send */
  const Blob *token, *end;
  int64_t due;
  Request *request;
  struct Conn *next;
  /* of a listening socket, which stands for its instance: who wants reports, and what the next one says */
  struct Conn *instance, *reports;
  char *received;
  size_t received_size, received_capacity;
  int64_t reported;
} Conn;

static int poller, num_tokens;
static int64_t gap_ns;
static const char *directory;
static Blob reports_head, encode_reply, prefill_reply, decode_head, token, last, openai_prefill, openai_head, openai_token,
    openai_last, models, empty, openai_encode[33];
static Conn *first_due, *last_due;
static Request *requests[TABLE];
static Conn *instances[64];
static int num_instances;

static int64_t now(void) {
  struct timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return t.tv_sec * 1000000000LL + t.tv_nsec;
}

static Blob load(const char *name) {
  char path[4096];
  snprintf(path, sizeof path, "%s/%s", directory, name);
  FILE *file = fopen(path, "rb");
  if (!file) { perror(path); exit(1); }
  Blob blob = {malloc(1 << 20), 0, NULL};
  blob.size = fread(blob.data, 1, 1 << 20, file);
  fclose(file);
  blob.stamp = memmem(blob.data, blob.size, "@@@@", 4);
  return blob;
}

static int send_all(Conn *conn, const char *data, size_t size) {
  while (size) {
    ssize_t sent = send(conn->fd, data, size, MSG_NOSIGNAL);
    if (sent > 0) { data += sent; size -= sent; continue; }
    struct pollfd writable = {conn->fd, POLLOUT, 0};
    if (errno != EAGAIN || poll(&writable, 1, 2000) <= 0) return -1;
  }
  return 0;
}

static int send_blob(Conn *conn, const Blob *blob) {
  if (blob->stamp) {
    char digits[STAMP + 1];
    snprintf(digits, sizeof digits, "%019lld", (long long)now());
    memcpy(blob->stamp, digits, STAMP);
  }
  return send_all(conn, blob->data, blob->size);
}

static void enqueue(Conn *conn, int64_t due) {
  conn->due = due;
  conn->next = NULL;
  if (last_due) last_due->next = conn; else first_due = conn;
  last_due = conn;
}

static void process(Conn *conn);

static void consume(Conn *conn) { /* the request is answered: on to the next on the connection */
  size_t rest = conn->size - conn->need;
  memmove(conn->in, conn->in + conn->need, rest);
  conn->size = rest;
  conn->need = 0;
  if (rest) process(conn);
}

static void forget(Request *request) {
  uint64_t hash = 1469598103934665603ULL;
  for (const char *p = request->id; *p; p++) hash = (hash ^ (unsigned char)*p) * 1099511628211ULL;
  Request **slot = &requests[hash % TABLE];
  while (*slot && *slot != request) slot = &(*slot)->next;
  if (*slot) *slot = request->next;
  if (request->prefill) request->prefill->request = NULL;
  if (request->decode) request->decode->request = NULL;
  free(request);
}

static void drop(Conn *conn) {
  if (conn->closed) return;
  conn->closed = 1;
  if (conn->instance && conn->instance->reports == conn) conn->instance->reports = NULL;
  if (conn->request) {
    if (conn->request->prefill == conn) conn->request->prefill = NULL;
    if (conn->request->decode == conn) conn->request->decode = NULL;
    if (!conn->request->prefill && !conn->request->decode) forget(conn->request);
  }
  close(conn->fd);
  if (!conn->streaming) { free(conn->in); free(conn); }
}

static Request *request_of(Conn *conn) { /* by the msgpack string behind "request_id", near the body's start */
  char *body = conn->in + conn->head;
  size_t size = conn->need - conn->head;
  unsigned char *p = memmem(body, size < 4096 ? size : 4096, "\xaarequest_id", 11);
  if (!p) return NULL;
  p += 11;
  size_t length = *p == 0xd9 ? p[1] : *p & 0x1f;
  p += *p == 0xd9 ? 2 : 1;
  uint64_t hash = 1469598103934665603ULL;
  for (size_t i = 0; i < length; i++) hash = (hash ^ p[i]) * 1099511628211ULL;
  Request **slot = &requests[hash % TABLE];
  for (Request *one = *slot; one; one = one->next)
    if (strlen(one->id) == length && !memcmp(one->id, p, length)) return one;
  Request *made = calloc(1, sizeof *made);
  memcpy(made->id, p, length < 95 ? length : 95);
  made->images = -1;
  made->next = *slot;
  return *slot = made;
}

static void stream(Conn *conn, const Blob *head, int count, const Blob *each, const Blob *end) {
  if (send_blob(conn, head)) { drop(conn); return; }
  conn->left = count;
  conn->token = each;
  conn->end = end;
  if (gap_ns) {
    conn->streaming = 1;
    enqueue(conn, now() + gap_ns);
    return;
  }
  for (; conn->left; conn->left--)
    if (send_blob(conn, each)) { drop(conn); return; }
  if (send_blob(conn, end)) { drop(conn); return; }
  consume(conn);
}

static void advance(Request *request) {
  if (request->prefill && !request->prefilled && request->encoded >= request->images) {
    Conn *conn = request->prefill;
    request->prefilled = 1;
    request->prefill = NULL;
    conn->request = NULL;
    if (send_blob(conn, &prefill_reply)) drop(conn); else consume(conn);
  }
  if (request->prefilled && request->decode) {
    Conn *conn = request->decode;
    forget(request);
    stream(conn, &decode_head, num_tokens - 1, &token, &last);
  }
}

static void note(Conn *conn, const char *id) { /* for the next report */
  Conn *instance = conn->instance;
  size_t wanted = instance->received_size + strlen(id) + 8;
  if (!instance->reports) return;
  if (instance->received_capacity < wanted) instance->received = realloc(instance->received, instance->received_capacity = wanted * 2);
  instance->received_size += sprintf(instance->received + instance->received_size, "%s\"%c%s\"", instance->received_size ? "," : "", conn->role, id);
}

static void report(Conn *instance, int64_t time) {
  static const char begin[] = "{\"load\":{},\"received\":[", end[] = "]}\n";
  char head[32];
  int size = sprintf(head, "%zx\r\n", sizeof begin - 1 + instance->received_size + sizeof end - 1);
  Conn *to = instance->reports;
  size_t received = instance->received_size;
  instance->received_size = 0;
  instance->reported = time;
  if (send_all(to, head, size) || send_all(to, begin, sizeof begin - 1) || send_all(to, instance->received, received) ||
      send_all(to, end, sizeof end - 1) || send_all(to, "\r\n", 2))
    drop(to);
}

static void report_all(void) {
  int64_t time = now();
  for (int i = 0; i < num_instances; i++)
    if (instances[i]->reports && time - instances[i]->reported >= (instances[i]->received_size ? LEAST_REPORT_NS : REPORT_NS))
      report(instances[i], time);
}

static int count(const char *at, const char *end, const char *what) {
  int found = 0;
  size_t size = strlen(what);
  while ((at = memmem(at, end - at, what, size))) { found++; at += size; }
  return found;
}

static void answer(Conn *conn) {
  char *path = strchr(conn->in, ' ') + 1, *body = conn->in + conn->head, *end = conn->in + conn->need;
  const Blob *reply = &empty;
  if (!strncmp(path, "/stage/", 7)) {
    Request *request = request_of(conn);
    if (!request) { drop(conn); return; }
    note(conn, request->id);
    if (conn->role == 'E') {
      request->encoded++;
      if (send_blob(conn, &encode_reply)) { drop(conn); return; }
      consume(conn);
      advance(request);
      return;
    }
    conn->request = request;
    if (conn->role == 'P') {
      request->prefill = conn;
      request->images = count(body, end, "mm_hash");
    } else {
      request->decode = conn;
    }
    advance(request);
    return;
  }
  if (!strncmp(path, "/v1/chat/", 9)) {
    int images = conn->role == 'E' ? count(body, end, ";base64,") : 0;
    if (conn->role == 'D') { stream(conn, &openai_head, num_tokens, &openai_token, &openai_last); return; }
    reply = conn->role == 'E' ? &openai_encode[images > 32 ? 32 : images] : &openai_prefill;
  } else if (!strncmp(path, "/info", 5)) {
    char name[32];
    snprintf(name, sizeof name, "info.%d", conn->port);
    Blob info = load(name);
    int failed = send_blob(conn, &info);
    free(info.data);
    if (failed) drop(conn); else consume(conn);
    return;
  } else if (!strncmp(path, "/reports", 8)) {
    if (send_blob(conn, &reports_head)) { drop(conn); return; }
    conn->instance->reports = conn;
    consume(conn);
    report(conn->instance, now());
    return;
  } else if (!strncmp(path, "/v1/models", 10)) {
    reply = &models;
  } else if (!strncmp(path, "/gap/", 5)) {
    gap_ns = atol(path + 5) * 1000000LL;
  }
  if (send_blob(conn, reply)) drop(conn); else consume(conn);
}

static void process(Conn *conn) {
  if (!conn->need) {
    char *end = memmem(conn->in, conn->size, "\r\n\r\n", 4);
    if (!end) return;
    conn->head = end + 4 - conn->in;
    size_t length = 0;
    for (char *line = conn->in; line < end; ) {
      char *stop = memmem(line, end + 2 - line, "\r\n", 2);
      if (!strncasecmp(line, "content-length:", 15)) length = strtoul(line + 15, NULL, 10);
      if (!strncasecmp(line, "transfer-encoding:", 18)) { fputs("chunked requests are not read\n", stderr); drop(conn); return; }
      line = stop + 2;
    }
    conn->need = conn->head + length;
  }
  if (conn->size >= conn->need) answer(conn);
}

static void readable(Conn *conn) {
  for (;;) {
    size_t wanted = conn->need > conn->size + 65536 ? conn->need : conn->size + 65536;
    if (conn->capacity < wanted) conn->in = realloc(conn->in, conn->capacity = wanted * 2);
    ssize_t got = recv(conn->fd, conn->in + conn->size, conn->capacity - conn->size, 0);
    if (got < 0 && errno == EAGAIN) return;
    if (got <= 0) { drop(conn); return; }
    conn->size += got;
    if (conn->streaming || conn->request) continue;
    if (!conn->need || conn->size >= conn->need) { process(conn); return; } /* level-triggered: the rest comes again */
  }
}

static void accept_all(Conn *listener) {
  int fd, one = 1;
  while ((fd = accept4(listener->fd, NULL, NULL, SOCK_NONBLOCK)) >= 0) {
    setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &one, sizeof one);
    Conn *conn = calloc(1, sizeof *conn);
    conn->fd = fd;
    conn->role = listener->role;
    conn->port = listener->port;
    conn->instance = listener;
    struct epoll_event event = {.events = EPOLLIN, .data.ptr = conn};
    epoll_ctl(poller, EPOLL_CTL_ADD, fd, &event);
  }
}

static void send_due(void) {
  int64_t time = now();
  while (first_due && first_due->due <= time) {
    Conn *conn = first_due;
    first_due = conn->next;
    if (!first_due) last_due = NULL;
    if (conn->closed) { free(conn->in); free(conn); continue; }
    if (send_blob(conn, conn->token)) { conn->streaming = 0; drop(conn); continue; }
    if (--conn->left) { enqueue(conn, conn->due + gap_ns); continue; }
    conn->streaming = 0;
    if (send_blob(conn, conn->end)) drop(conn); else consume(conn);
  }
}

int main(int argc, char **argv) {
  signal(SIGPIPE, SIG_IGN);
  poller = epoll_create1(0);
  directory = argv[1];
  num_tokens = atoi(argv[2]);
  reports_head = load("reports_head"); encode_reply = load("encode_reply"); prefill_reply = load("prefill_reply"); decode_head = load("decode_head");
  token = load("token"); last = load("last"); openai_prefill = load("openai_prefill");
  openai_head = load("openai_head"); openai_token = load("openai_token"); openai_last = load("openai_last");
  models = load("models"); empty = load("empty");
  for (int i = 0; i < 33; i++) {
    char name[32];
    snprintf(name, sizeof name, "openai_encode.%d", i);
    openai_encode[i] = load(name);
  }
  for (int i = 3; i < argc; i++) {
    int one = 1, fd = socket(AF_INET, SOCK_STREAM | SOCK_NONBLOCK, 0), port = atoi(argv[i] + 2);
    setsockopt(fd, SOL_SOCKET, SO_REUSEADDR, &one, sizeof one);
    struct sockaddr_in address = {.sin_family = AF_INET, .sin_port = htons(port), .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
    if (bind(fd, (void *)&address, sizeof address) || listen(fd, 4096)) { perror(argv[i]); return 1; }
    Conn *listener = calloc(1, sizeof *listener);
    instances[num_instances++] = listener;
    *listener = (Conn){.fd = fd, .listening = 1, .role = argv[i][0], .port = port};
    struct epoll_event event = {.events = EPOLLIN, .data.ptr = listener};
    epoll_ctl(poller, EPOLL_CTL_ADD, fd, &event);
  }
  puts("ready");
  fflush(stdout);
  for (;;) {
    struct epoll_event events[256];
    int64_t left = first_due ? first_due->due - now() : LEAST_REPORT_NS;
    if (left > LEAST_REPORT_NS) left = LEAST_REPORT_NS;
    struct timespec wait = {0, left > 0 ? left : 0};
    int ready = epoll_pwait2(poller, events, 256, &wait, NULL);
    for (int i = 0; i < ready; i++) {
      Conn *conn = events[i].data.ptr;
      if (conn->listening) accept_all(conn);
      else if (!conn->closed) readable(conn);
    }
    send_due();
    report_all();
  }
}
