/* clang-format off */
/*
 * rollstore: a place in shared memory where rollout workers put inference engines' replies (tokens,
 * their top-k candidates and log-probabilities) and a trainer finds them, with no copy, no parsing
 * and no loss in between.
 *
 * A worker:
 *
 *   rst_store *store;
 *   rst_error e;
 *   rst_put_options o = {.decode = {.topk = 32}, .prompt_ids = prompt, .prompt_count = p};
 *   rst_outcome outcome = {RST_STATUS_COMPLETED, reward, group_index, RST_NO_INDEX};
 *   rst_store_open("/dev/shm/run1", RST_OPEN_CREATE, NULL, &store, &e);
 *   rst_put_reply(store, id, id_size, 0, reply, size, &o, NULL, &e);
 *   rst_seal(store, id, id_size, &outcome, 0, &e);
 *
 * A trainer:
 *
 *   rst_snapshot *now;
 *   rst_session s;
 *   rst_turn t;
 *   rst_snapshot_open(store, &now, &e);
 *   for (uint64_t n = 0; !rst_ready_next(now, n, &s, &e); n = s.sequence)
 *       rst_turn_get_by_key(now, s.key, 0, &t, &e);     // t.topk_logprobs lies in the map
 *   rst_snapshot_close(now);
 *
 * Every function returns an rst_code, 0 when it succeeded.
 *
 * What to know before a long night:
 *   fork       A handle does not survive fork: its calls return RST_ERR_FORKED in the child.
 *              Open again there.
 *   two opens  One process may open a store as often as it likes, but not for writing while it is
 *              open read-only in the same process.
 *   snapshots  Views live as long as their snapshot.  An open snapshot keeps what is released since
 *              from being used again; stat shows the oldest one.
 *   capacity   Is set at creation and allocated then, in full.  At capacity a put waits for a
 *              release, up to its timeout.
 *   kill -9    Of any process at any moment leaves the store whole.
 *   power cut  What survives is what rst_durability says (layout.h).
 *   remote     A network file system cannot hold a store: its mappings are not shared.
 *
 * Layers, each on those before it: error, layout | record (replies), proxy | store | sample,
 * consumer | ingest.
 */
/* clang-format on */
#ifndef ROLLSTORE_H
#define ROLLSTORE_H

#include <rollstore/consumer.h>
#include <rollstore/error.h>
#include <rollstore/ingest.h>
#include <rollstore/layout.h>
#include <rollstore/proxy.h>
#include <rollstore/record.h>
#include <rollstore/sample.h>
#include <rollstore/store.h>

#endif
