/* Stage instances that cost next to nothing: one epoll thread plays E, P and D on several ports.
 *
 *   stage DIRECTORY TOKENS E:PORT P:PORT D:PORT ...
 *
 * They speak the link of epd-serve (epd_serve/rpc/messages.py) without a key, and vLLM's HTTP
 * (/v1/chat/completions). What they answer lies in DIRECTORY, ready to be sent (answers.py writes it); a run of '@' in
 * an event is replaced by the time at which the event leaves, in nanoseconds of CLOCK_MONOTONIC. GET /gap/N sets the
 * milliseconds of a step, in which D gives one token of each of its streams; 0: tokens come as fast as they are taken.
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

#define STREAMS (1 << 14)
#define FRAME_HEAD 9 /* the length, and the number of messages */

/* What is sent over HTTP; and over a link a head, a piece of the body, the end, each if it is there. */
typedef struct Blob { char *data; size_t size; char *stamp; struct Blob *head, *body; int ends; } Blob;

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
  int greeting; /* frames of the greeting that are still to come */
  const Blob *token, *end;
  int64_t due;
  Request *request;
  struct Conn *next;
  /* of a listening socket, which stands for its instance: who wants reports, and what the next one says */
  struct Conn *instance, *reports;
  char *received;
  size_t received_size, received_capacity;
  int64_t reported;
  struct Conn *first_due, *last_due; /* its streams, in the order of their next tokens */
  int64_t phase; /* of its steps */
  /* of a connection for streams, and of a stream on it, which stands for a connection of its own */
  struct Conn **streams, *link;
  uint32_t number, out_count;
  char *out;
  size_t out_size, out_capacity;
} Conn;

static int poller, num_tokens;
static int64_t gap_ns;
static const char *directory;
static Blob encode_reply, prefill_reply, decode_head, token, last, openai_prefill, openai_head, openai_token,
    openai_last, models, empty, openai_encode[33], opening, plain_head, encode_body, prefill_head,
    first_token, framed_head, framed_token, framed_last, plain_reply;
static Conn *links[64];
static int num_links;
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
  Blob blob = {.data = malloc(1 << 20)};
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

static void stamp(const Blob *blob) {
  if (!blob->stamp) return;
  char digits[STAMP + 1];
  snprintf(digits, sizeof digits, "%019lld", (long long)now());
  memcpy(blob->stamp, digits, STAMP);
}

/* MessagePack: an array of the message's kind, the stream's number and what else it has. */
static char *message(Conn *link, int fields, int kind, uint32_t number, size_t more) {
  size_t wanted = link->out_size + 7 + more;
  if (link->out_capacity < wanted) link->out = realloc(link->out, link->out_capacity = wanted * 2);
  if (!link->out_count++) link->out_size = FRAME_HEAD;
  char *p = link->out + link->out_size;
  *p++ = 0x90 | fields;
  *p++ = kind;
  *p++ = 0xce;
  number = htonl(number);
  memcpy(p, &number, 4);
  link->out_size += 7 + more;
  return p + 4;
}

static int send_message(Conn *conn, const Blob *blob) {
  if (blob->head) memcpy(message(conn->link, 3, 0, conn->number, blob->head->size), blob->head->data, blob->head->size);
  if (blob->body) {
    stamp(blob->body);
    char *p = message(conn->link, 3, 1, conn->number, 5 + blob->body->size);
    uint32_t size = htonl(blob->body->size);
    *p = 0xc6;
    memcpy(p + 1, &size, 4);
    memcpy(p + 5, blob->body->data, blob->body->size);
  }
  if (blob->ends) message(conn->link, 2, 2, conn->number, 0);
  return 0;
}

static int send_blob(Conn *conn, const Blob *blob) {
  if (conn->link) return send_message(conn, blob);
  stamp(blob);
  return send_all(conn, blob->data, blob->size);
}

static void enqueue(Conn *conn, int64_t due) {
  Conn *instance = conn->instance;
  conn->due = due;
  conn->next = NULL;
  if (instance->last_due) instance->last_due->next = conn; else instance->first_due = conn;
  instance->last_due = conn;
}

static int64_t next_step(Conn *instance) {
  int64_t phase = instance->phase % gap_ns;
  return (now() - phase) / gap_ns * gap_ns + phase + gap_ns;
}

static void process(Conn *conn);

static void consume(Conn *conn) { /* the request is answered: on to the next on the connection */
  if (conn->link) {
    if (conn->link->streams[conn->number % STREAMS] == conn) conn->link->streams[conn->number % STREAMS] = NULL;
    free(conn);
    return;
  }
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
  if (conn->link) {
    if (conn->link->streams[conn->number % STREAMS] == conn) conn->link->streams[conn->number % STREAMS] = NULL;
  } else {
    close(conn->fd);
  }
  if (conn->streams) {
    for (int i = 0; i < STREAMS; i++) if (conn->streams[i]) drop(conn->streams[i]);
    for (int i = 0; i < num_links; i++) if (links[i] == conn) { links[i] = links[--num_links]; break; }
    free(conn->streams);
    free(conn->out);
  }
  if (!conn->streaming) { free(conn->in); free(conn); }
}

static Request *request_of(char *body, size_t size) { /* by the msgpack string behind "request_id", near its start */
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
    enqueue(conn, next_step(conn->instance));
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
  Conn *to = instance->reports;
  size_t received = instance->received_size, size = sizeof begin - 1 + received + sizeof end - 1;
  char *p = message(to->link, 3, 1, to->number, 5 + size);
  uint32_t length = htonl(size);
  instance->received_size = 0;
  instance->reported = time;
  *p = 0xc6;
  memcpy(p + 1, &length, 4);
  memcpy(p + 5, begin, sizeof begin - 1);
  if (received) memcpy(p + 5 + sizeof begin - 1, instance->received, received);
  memcpy(p + 5 + sizeof begin - 1 + received, end, sizeof end - 1);
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

static void ask(Conn *conn, char *body, size_t size) { /* a call to a stage */
  Request *request = request_of(body, size);
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
    request->images = count(body, body + size, "mm_hash");
  } else {
    request->decode = conn;
  }
  advance(request);
}

static uint32_t number_at(unsigned char *p, int bytes) {
  uint32_t value = 0;
  while (bytes--) value = value << 8 | *p++;
  return value;
}

/* Behind one value of MessagePack, of those that calls have; *size is that of a string or of bytes. */
static unsigned char *behind(unsigned char *p, uint32_t *size) {
  unsigned char kind = *p++;
  *size = kind & 0x1f;
  if (kind < 0x80) { *size = kind; return p; }
  if (kind >= 0xa0 && kind < 0xc0) return p + *size;
  switch (kind) {
    case 0xc4: case 0xd9: *size = number_at(p, 1); return p + 1 + *size;
    case 0xc5: case 0xda: *size = number_at(p, 2); return p + 2 + *size;
    case 0xc6: case 0xdb: *size = number_at(p, 4); return p + 4 + *size;
    case 0xcc: *size = number_at(p, 1); return p + 1;
    case 0xcd: *size = number_at(p, 2); return p + 2;
    case 0xce: *size = number_at(p, 4); return p + 4;
  }
  if (kind >= 0x90 && kind < 0xa0) {
    uint32_t ignored;
    for (int left = kind & 0xf; left; left--) p = behind(p, &ignored);
    return p;
  }
  fprintf(stderr, "a call with 0x%02x is not read\n", kind);
  exit(1);
}

static void look(Conn *conn, const char *path) { /* a call that wants to know how an instance is */
  if (!strcmp(path, "/reports")) {
    Blob begun = {.head = &plain_head};
    send_blob(conn, &begun);
    conn->instance->reports = conn;
    report(conn->instance, now());
    return;
  }
  if (!strcmp(path, "/info")) {
    char name[32];
    snprintf(name, sizeof name, "info.%d", conn->port);
    Blob info = load(name), reply = {.head = &plain_head, .body = &info, .ends = 1};
    send_blob(conn, &reply);
    free(info.data);
  } else {
    send_blob(conn, &plain_reply);
  }
  consume(conn);
}

static void take_frame(Conn *conn, unsigned char *p) { /* calls, words of credit, cancellations */
  uint32_t left = *p & 0xf, number, size;
  if ((*p++ & 0xf0) != 0x90) { fputs("a list of more than 15 messages is not read\n", stderr); exit(1); }
  for (; left; left--) {
    int kind = p[1];
    p = behind(p + 2, &number);
    if (kind) {
      Conn *stream = conn->streams[number % STREAMS];
      if (kind == 1) p = behind(p, &size);
      else if (stream && stream->number == number) drop(stream);
      continue;
    }
    unsigned char *body = behind(p, &size);
    char path[32] = "";
    memcpy(path, body - size, size < 31 ? size : 31);
    p = behind(body, &size);
    Conn *stream = calloc(1, sizeof *stream);
    stream->fd = -1;
    stream->role = conn->role;
    stream->port = conn->port;
    stream->instance = conn->instance;
    stream->link = conn;
    stream->number = number;
    conn->streams[number % STREAMS] = stream;
    if (!strncmp(path, "/stage/", 7)) ask(stream, (char *)p - size, size);
    else look(stream, path);
  }
}

static void take_frames(Conn *conn) {
  size_t start = 0;
  while (conn->size >= start + 4) {
    uint32_t length;
    memcpy(&length, conn->in + start, 4);
    if (conn->size < start + 4 + length) { conn->need = 4 + length; break; }
    if (conn->greeting) conn->greeting--;
    else take_frame(conn, (unsigned char *)conn->in + start + 4);
    start += 4 + length;
  }
  memmove(conn->in, conn->in + start, conn->size -= start);
}

static void flush_links(void) {
  for (int i = 0; i < num_links; i++) {
    Conn *link = links[i];
    if (!link->out_count) continue;
    uint32_t size = link->out_size - 4, count = htonl(link->out_count);
    memcpy(link->out, &size, 4);
    link->out[4] = 0xdd;
    memcpy(link->out + 5, &count, 4);
    link->out_count = 0;
    if (send_all(link, link->out, link->out_size)) { drop(link); i--; }
  }
}

static void answer(Conn *conn) {
  char *path = strchr(conn->in, ' ') + 1, *body = conn->in + conn->head, *end = conn->in + conn->need;
  const Blob *reply = &empty;
  if (!strncmp(path, "/v1/chat/", 9)) {
    int images = conn->role == 'E' ? count(body, end, ";base64,") : 0;
    if (conn->role == 'D') { stream(conn, &openai_head, num_tokens, &openai_token, &openai_last); return; }
    reply = conn->role == 'E' ? &openai_encode[images > 32 ? 32 : images] : &openai_prefill;
  } else if (!strncmp(path, "/v1/models", 10)) {
    reply = &models;
  } else if (!strncmp(path, "/gap/", 5)) {
    gap_ns = atol(path + 5) * 1000000LL;
  }
  if (send_blob(conn, reply)) drop(conn); else consume(conn);
}

static void process(Conn *conn) {
  if (conn->streams) { take_frames(conn); return; }
  if (!conn->need && !conn->in[0]) {
    size_t begun = (char *)memchr(opening.data, '\n', opening.size) + 1 - opening.data;
    if (conn->size < begun) return;
    if (memcmp(conn->in, opening.data, begun)) { fputs("a link of another version\n", stderr); exit(1); }
    if (send_all(conn, opening.data, opening.size)) { drop(conn); return; }
    conn->streams = calloc(STREAMS, sizeof *conn->streams);
    links[num_links++] = conn;
    conn->greeting = 2;
    memmove(conn->in, conn->in + begun, conn->size -= begun);
    take_frames(conn);
    return;
  }
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
    if (!conn->need || conn->size >= conn->need) { conn->need = conn->streams ? 0 : conn->need; process(conn); return; } /* level-triggered: the rest comes again */
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

static void send_due_of(Conn *instance, int64_t time) {
  while (instance->first_due && instance->first_due->due <= time) {
    Conn *conn = instance->first_due;
    instance->first_due = conn->next;
    if (!instance->first_due) instance->last_due = NULL;
    if (conn->closed) { free(conn->in); free(conn); continue; }
    if (send_blob(conn, conn->token)) { conn->streaming = 0; drop(conn); continue; }
    if (--conn->left) { enqueue(conn, conn->due + gap_ns); continue; }
    conn->streaming = 0;
    if (send_blob(conn, conn->end)) drop(conn); else consume(conn);
  }
}

static int64_t send_due(void) { /* when the next are due */
  int64_t time = now(), next = time + LEAST_REPORT_NS;
  for (int i = 0; i < num_instances; i++) {
    send_due_of(instances[i], time);
    if (instances[i]->first_due && instances[i]->first_due->due < next) next = instances[i]->first_due->due;
  }
  return next;
}

int main(int argc, char **argv) {
  signal(SIGPIPE, SIG_IGN);
  poller = epoll_create1(0);
  directory = argv[1];
  num_tokens = atoi(argv[2]);
  openai_prefill = load("openai_prefill");
  openai_head = load("openai_head"); openai_token = load("openai_token"); openai_last = load("openai_last");
  models = load("models"); empty = load("empty");
  opening = load("opening"); plain_head = load("plain_head"); encode_body = load("encode_body");
  prefill_head = load("prefill_head"); first_token = load("first_token"); framed_head = load("framed_head");
  framed_token = load("framed_token"); framed_last = load("framed_last");
  plain_reply.head = &plain_head; plain_reply.ends = 1;
  encode_reply.head = &plain_head; encode_reply.body = &encode_body; encode_reply.ends = 1;
  prefill_reply.head = &prefill_head; prefill_reply.body = &first_token; prefill_reply.ends = 1;
  decode_head.head = &framed_head; token.body = &framed_token; last.body = &framed_last; last.ends = 1;
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
    *listener = (Conn){.fd = fd, .listening = 1, .role = argv[i][0], .port = port, .phase = i * 5000000LL};
    struct epoll_event event = {.events = EPOLLIN, .data.ptr = listener};
    epoll_ctl(poller, EPOLL_CTL_ADD, fd, &event);
  }
  puts("ready");
  fflush(stdout);
  int64_t next = now();
  for (;;) {
    struct epoll_event events[256];
    int64_t left = next - now();
    struct timespec wait = {0, left > 0 ? left : 0};
    int ready = epoll_pwait2(poller, events, 256, &wait, NULL);
    for (int i = 0; i < ready; i++) {
      Conn *conn = events[i].data.ptr;
      if (conn->listening) accept_all(conn);
      else if (!conn->closed) readable(conn);
    }
    next = send_due();
    flush_links();
    report_all();
  }
}
