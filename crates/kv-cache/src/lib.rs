//! kv-cache
