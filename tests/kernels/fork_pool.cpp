// Use the thread pool before and after a fork: the child has no workers and must compute everything itself.
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>

#include "pool.h"

using namespace headstart;

bool computes(Pool& pool) {
  for (int round = 0; round < 100; ++round) {
    std::atomic<int> total = 0;
    pool.run(50, [&](uint32_t part) { total += part; });
    if (total != 49 * 50 / 2) return false;
  }
  return true;
}

int main() {
  Pool pool;
  pool.start(3);
  if (!computes(pool)) return 1;
  const pid_t child = fork();
  if (child == 0) _exit(computes(pool) ? 0 : 2);
  int status = 0;
  const bool parent = computes(pool);
  waitpid(child, &status, 0);
  _exit(!parent ? 3 : WIFEXITED(status) ? WEXITSTATUS(status) : 4);
}
