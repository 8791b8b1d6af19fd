-- What a connection is asked first. Nothing here needs the tables, or any right but to connect.
SELECT current_setting('server_version_num')::integer,
  current_setting('server_version'),
  current_setting('server_encoding'),
  current_setting('synchronous_commit'),
  current_setting('fsync'),
  pg_is_in_recovery(),
  floor(extract(epoch FROM clock_timestamp()) * 1000)::bigint,
  to_regnamespace('{schema}') IS NOT NULL,
  (
    SELECT count(*) FROM pg_catalog.pg_class c
    WHERE c.relnamespace = to_regnamespace('{schema}') AND c.relname = ANY (%(tables)s)
  ),
  (
    SELECT count(*) FROM pg_catalog.pg_proc p
    WHERE p.pronamespace = to_regnamespace('{schema}') AND p.proname = ANY (%(functions)s)
  )
