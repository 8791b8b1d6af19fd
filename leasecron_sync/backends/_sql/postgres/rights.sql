-- What this user may do with the store, and what of it is there; for who only looks.
SELECT
  to_regnamespace('{schema}') IS NOT NULL,
  coalesce(has_schema_privilege(to_regnamespace('{schema}'), 'USAGE'), false),
  coalesce(
    has_schema_privilege(to_regnamespace('{schema}'), 'CREATE'),
    has_database_privilege(current_database(), 'CREATE')
  ),
  ARRAY(
    SELECT c.relname::text FROM pg_catalog.pg_class c
    WHERE c.relnamespace = to_regnamespace('{schema}') AND c.relname = ANY (%(tables)s)
  ),
  ARRAY(
    SELECT DISTINCT p.proname::text FROM pg_catalog.pg_proc p
    WHERE p.pronamespace = to_regnamespace('{schema}') AND p.proname = ANY (%(functions)s)
  ),
  ARRAY(
    SELECT r.name || ' on ' || c.relname
    FROM pg_catalog.pg_class c
      CROSS JOIN unnest(ARRAY['SELECT', 'INSERT', 'UPDATE', 'DELETE']) WITH ORDINALITY AS r (name, pos)
    WHERE c.relnamespace = to_regnamespace('{schema}') AND c.relname = ANY (%(tables)s)
      AND NOT has_table_privilege(c.oid, r.name)
    ORDER BY c.relname, r.pos
  ) || ARRAY(
    SELECT 'EXECUTE on ' || p.proname
    FROM pg_catalog.pg_proc p
    WHERE p.pronamespace = to_regnamespace('{schema}') AND p.proname = ANY (%(functions)s)
      AND NOT has_function_privilege(p.oid, 'EXECUTE')
    ORDER BY p.proname
  ),
  ARRAY(
    SELECT c.relname::text FROM pg_catalog.pg_class c
    WHERE c.relnamespace = to_regnamespace('{schema}') AND c.relname = ANY (%(tables)s)
      AND c.relpersistence = 'u'
  )
