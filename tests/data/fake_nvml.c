/* Stands in for libnvidia-ml.so.1 and libcuda.so.1 in tests.
 *
 * Answers come from the text file that FAKE_NVML names, read anew by every nvmlInit: lines of "key value".
 * "0.memory 80 10 60 10" are total, reserved, free and used bytes of GPU 0; "0.error.memory 3" makes the call fail.
 * A slice of GPU 0 is "0s1". -DOLD leaves out the calls that drivers of 2021 lacked.
 */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

typedef unsigned int u32;
typedef unsigned long long u64;
typedef const char *node;

static char script[1 << 16];
static char nodes[256][16];
static int node_count;

static const char *value(node at, const char *key) {
  static char found[1 << 12];
  char wanted[96];
  snprintf(wanted, sizeof wanted, "\n%s%s%s ", at ? at : "", at ? "." : "", key);
  const char *line = strstr(script, wanted);
  if (!line) return NULL;
  line += strlen(wanted);
  size_t length = strcspn(line, "\n");
  if (length >= sizeof found) length = sizeof found - 1;
  memcpy(found, line, length);
  found[length] = 0;
  return found;
}

static u64 number(node at, const char *key, u64 otherwise) {
  const char *text = value(at, key);
  return text ? strtoull(text, NULL, 0) : otherwise;
}

static int error(node at, const char *call) {
  char key[64];
  snprintf(key, sizeof key, "error.%s", call);
  return (int)number(at, key, 0);
}

#define FAILS(at, call) do { int code = error(at, call); if (code) return code; } while (0)

static node remember(const char *name) {
  for (int i = 0; i < node_count; i++) if (!strcmp(nodes[i], name)) return nodes[i];
  snprintf(nodes[node_count], sizeof nodes[0], "%s", name);
  return nodes[node_count++];
}

static int text(node at, const char *key, char *out, u32 size) {
  FAILS(at, key);
  const char *found = value(at, key);
  if (!found) return 3;
  if (strlen(found) + 1 > size) return 7;
  strcpy(out, found);
  /* "\x" stands for a byte that is not UTF-8, "\e" for an escape character. */
  for (char *c; (c = strstr(out, "\\x")); ) { *c = (char)0xff; memmove(c + 1, c + 2, strlen(c + 2) + 1); }
  for (char *c; (c = strstr(out, "\\e")); ) { *c = 27; memmove(c + 1, c + 2, strlen(c + 2) + 1); }
  return 0;
}

static void load(void) {
  const char *path = getenv("FAKE_NVML");
  FILE *file = path ? fopen(path, "rb") : NULL;
  size_t length = 1;
  script[0] = '\n';
  if (file) { length += fread(script + 1, 1, sizeof script - 2, file); fclose(file); }
  script[length] = 0;
}

int nvmlInitWithFlags(u32 flags) { (void)flags; load(); FAILS(NULL, "init"); return 0; }
int nvmlShutdown(void) { FAILS(NULL, "shutdown"); return 0; }
const char *nvmlErrorString(int code) { (void)code; return "an error"; }
int nvmlDeviceGetCount_v2(u32 *count) { FAILS(NULL, "count"); *count = (u32)number(NULL, "count", 0); return 0; }
int nvmlSystemGetDriverVersion(char *out, u32 size) { return text(NULL, "driver", out, size); }
int nvmlSystemGetCudaDriverVersion(int *out) { FAILS(NULL, "cuda"); *out = (int)number(NULL, "cuda", 0); return 0; }

int nvmlDeviceGetHandleByIndex_v2(u32 index, node *out) {
  char name[16];
  snprintf(name, sizeof name, "%u", index);
  FAILS(name, "handle");
  *out = remember(name);
  return 0;
}

int nvmlDeviceGetName(node at, char *out, u32 size) { return text(at, "name", out, size); }
int nvmlDeviceGetUUID(node at, char *out, u32 size) { return text(at, "uuid", out, size); }

int nvmlDeviceGetCudaComputeCapability(node at, int *major, int *minor) {
  FAILS(at, "capability");
  const char *found = value(at, "capability");
  return found && sscanf(found, "%d %d", major, minor) == 2 ? 0 : 3;
}

static int amounts(node at, const char *call, u64 *total, u64 *reserved, u64 *left, u64 *used) {
  FAILS(at, call);
  const char *found = value(at, "memory");
  if (!found) return 3;
  return sscanf(found, "%llu %llu %llu %llu", total, reserved, left, used) == 4 ? 0 : 999;
}

struct memory { u64 total, left, used; };
int nvmlDeviceGetMemoryInfo(node at, struct memory *out) {
  u64 reserved = 0;
  int code = amounts(at, "memory", &out->total, &reserved, &out->left, &out->used);
  out->used += reserved; /* the first call counts what the driver keeps as used */
  return code;
}

#ifndef OLD
struct memory_v2 { u32 version; u64 total, reserved, left, used; };
int nvmlDeviceGetMemoryInfo_v2(node at, struct memory_v2 *out) {
  if (out->version != 0x02000028) return 25;
  FAILS(at, "memory_v2");
  return amounts(at, "memory", &out->total, &out->reserved, &out->left, &out->used);
}
#endif

struct process { u32 pid; u64 bytes; u32 instance, compute; };
static int processes(node at, const char *kind, u32 *count, struct process *out) {
  char key[32];
  u32 room = *count;
  FAILS(at, kind);
  for (*count = 0; *count < 16; ++*count) {
    snprintf(key, sizeof key, "%s%u", kind, *count);
    const char *found = value(at, key);
    if (!found) break;
    if (out && *count < room) {
      char bytes[32] = "";
      sscanf(found, "%u %31s", &out[*count].pid, bytes);
      out[*count].bytes = strcmp(bytes, "?") ? strtoull(bytes, NULL, 0) : ~0ULL;
    }
  }
  return *count > (out ? room : 0) ? 7 : 0;
}
int nvmlDeviceGetComputeRunningProcesses_v2(node at, u32 *count, struct process *out) { return processes(at, "compute", count, out); }
int nvmlDeviceGetGraphicsRunningProcesses_v2(node at, u32 *count, struct process *out) { return processes(at, "graphics", count, out); }
#ifndef OLD
int nvmlDeviceGetComputeRunningProcesses_v3(node at, u32 *count, struct process *out) { return processes(at, "compute", count, out); }
int nvmlDeviceGetGraphicsRunningProcesses_v3(node at, u32 *count, struct process *out) { return processes(at, "graphics", count, out); }
#endif

static int count_of(node at, const char *key, u32 *out) {
  FAILS(at, key);
  const char *found = value(at, key);
  if (!found) return 3;
  *out = (u32)strtoul(found, NULL, 0);
  return 0;
}
int nvmlDeviceGetMaxPcieLinkGeneration(node at, u32 *out) { return count_of(at, "pcie_generation", out); }
int nvmlDeviceGetMaxPcieLinkWidth(node at, u32 *out) { return count_of(at, "pcie_width", out); }
int nvmlDeviceGetMigMode(node at, u32 *now, u32 *pending) { *pending = 0; return count_of(at, "mig", now); }
int nvmlDeviceGetMaxMigDeviceCount(node at, u32 *out) { return count_of(at, "slices", out); }
int nvmlDeviceGetMigDeviceHandleByIndex(node at, u32 index, node *out) {
  char name[16];
  snprintf(name, sizeof name, "%.4ss%u", at, index);
  FAILS(name, "handle");
  if (!value(name, "uuid")) return 6;
  *out = remember(name);
  return 0;
}

int nvmlDeviceGetHandleByUUID(const char *uuid, node *out) {
  for (u32 index = 0; index < 16; index++) {
    char name[16];
    snprintf(name, sizeof name, "%u", index);
    const char *found = value(name, "uuid");
    if (found && !strcmp(found, uuid)) { *out = remember(name); return 0; }
  }
  return 6;
}
int nvmlDeviceGetClockInfo(node at, u32 kind, u32 *out) { return count_of(at, kind == 1 ? "sm_clock" : kind == 2 ? "memory_clock" : "", out); }
int nvmlDeviceGetMaxClockInfo(node at, u32 kind, u32 *out) { return count_of(at, kind == 1 ? "sm_clock_max" : kind == 2 ? "memory_clock_max" : "", out); }
int nvmlDeviceGetPowerUsage(node at, u32 *out) { return count_of(at, "milliwatts", out); }
int nvmlDeviceGetEnforcedPowerLimit(node at, u32 *out) { return count_of(at, "milliwatts_max", out); }
int nvmlDeviceGetTemperature(node at, u32 sensor, u32 *out) { return sensor ? 2 : count_of(at, "temperature", out); }
int nvmlDeviceGetPersistenceMode(node at, u32 *out) { return count_of(at, "persistence", out); }
int nvmlDeviceGetCurrentClocksThrottleReasons(node at, u64 *out) { FAILS(at, "reasons"); *out = number(at, "reasons", 0); return 0; }

struct pci { char legacy[16]; u32 domain, bus, device, id, subsystem; char bus_id[32]; };
int nvmlDeviceGetPciInfo_v3(node at, struct pci *out) { memset(out, 0, sizeof *out); return text(at, "bus", out->bus_id, 32); }
static node link_of(node at, u32 link) {
  static char name[32];
  snprintf(name, sizeof name, "%.4sl%u", at, link);
  return name;
}
int nvmlDeviceGetNvLinkState(node at, u32 link, u32 *out) { return count_of(link_of(at, link), "active", out); }
int nvmlDeviceGetNvLinkRemoteDeviceType(node at, u32 link, u32 *out) { return count_of(link_of(at, link), "type", out); }
int nvmlDeviceGetNvLinkRemotePciInfo_v2(node at, u32 link, struct pci *out) {
  memset(out, 0, sizeof *out);
  return text(link_of(at, link), "bus", out->bus_id, 32);
}

int cuInit(u32 flags) { (void)flags; load(); FAILS(NULL, "cuInit"); return 0; }
int cuDeviceGetCount(int *out) { *out = (int)number(NULL, "cuda_devices", 0); return 0; }
int cuDeviceGet(int *out, int index) { *out = index; return 0; }
static node cuda_of(int device) {
  static char name[16];
  snprintf(name, sizeof name, "c%d", device);
  return name;
}
int cuDeviceGetName(char *out, int size, int device) { return text(cuda_of(device), "name", out, (u32)size); }
int cuDeviceTotalMem_v2(size_t *out, int device) { *out = number(cuda_of(device), "total", 0); return error(cuda_of(device), "total"); }
int cuDeviceGetUuid_v2(unsigned char out[16], int device) {
  const char *found = value(cuda_of(device), "uuid");
  if (!found) return 1;
  for (int i = 0; i < 16; i++) { u32 byte; sscanf(found + 2 * i, "%2x", &byte); out[i] = (unsigned char)byte; }
  return 0;
}
