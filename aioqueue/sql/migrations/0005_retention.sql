-- serves: 5
-- Retention: job, outcome and attempt in ranges of id time that are made ahead and dropped whole (functions/make_ranges.sql,
-- prune_range.sql). What was written before stands in DEFAULT, and is deleted row by row (prune_default.sql).

-- The ranges that exist. Each has three partitions named after it: job, outcome, attempt with `suffix`.
CREATE TABLE aioqueue.id_range (
    starts_at timestamptz NOT NULL PRIMARY KEY,
    ends_at   timestamptz NOT NULL,
    suffix    text        NOT NULL UNIQUE,
    look_at   timestamptz,
    CONSTRAINT range_is_not_empty CHECK (starts_at < ends_at)
);
CREATE INDEX outcome_default_finished ON aioqueue.outcome_default (state, finished_at);
