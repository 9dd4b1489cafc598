/*
 * rollstore: a place in shared memory where rollout workers put inference engines' replies (tokens,
 * their top-k candidates and log-probabilities) and a trainer finds them, with no copy, no parsing
 * and no loss in between.
 *
 *   A worker                                         A trainer
 *
 *   rst_store *store;                                rst_snapshot *now;
 *   rst_error e;                                     rst_session s;
 *   rst_put_options o = {.decode = {.topk = 32},     rst_turn t;
 *                        .prompt_ids = prompt,       rst_snapshot_open(store, &now, &e);
 *                        .prompt_count = p,          for (uint64_t n = 0;
 *                        .temperature = 1.0f};            !rst_ready_next(now, n, &s, &e);
 *   rst_store_open("/dev/shm/run1",                       n = s.sequence)
 *                  RST_OPEN_CREATE, NULL,                rst_turn_get_by_key(now, s.key, 0, &t,
 * &e); &store, &e);                      // t.topk_logprobs lies in the map rst_put_reply(store,
 * id, id_size, 0,             rst_snapshot_close(now); reply, size, &o, NULL, &e); rst_seal(store,
 * id, id_size, &outcome, 0, &e);
 *
 * Every function returns an rst_code, 0 when it succeeded.
 *
 * What to know before a long night:
 *   fork       A handle does not survive fork: its calls return RST_ERR_FORKED in the child.  Open
 * again. two opens  One process may open a store as often as it likes; but not for writing while it
 * is open read-only in the same process. snapshots  Views live as long as their snapshot.  An open
 * snapshot keeps what is released since from being used again; stat shows the oldest one. capacity
 * Is set at creation and allocated then, in full.  At capacity a put waits for a release, up to its
 * timeout. kill -9    Of any process at any moment leaves the store whole. remote     A network
 * file system cannot hold a store: its mappings are not shared. crash of the machine: what survives
 * is what rst_durability says.
 *
 * Layers, each on those before it: error, layout | record (replies), proxy | store | sample, consumer |
 * ingest.
 */
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
