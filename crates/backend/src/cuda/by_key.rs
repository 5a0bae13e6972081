//! Things made when first needed.

use std::{
    collections::HashMap,
    hash::Hash,
    sync::{Arc, Mutex, PoisonError},
};

use crate::BackendError;

/// Things made when first needed and kept: captured graphs use them for as long as they live.
pub(super) struct ByKey<K, V> {
    made: Mutex<HashMap<K, Arc<V>>>,
}

impl<K, V> Default for ByKey<K, V> {
    fn default() -> Self {
        Self { made: Mutex::default() }
    }
}

impl<K: Eq + Hash, V> ByKey<K, V> {
    pub(super) fn get(
        &self,
        key: K,
        make: impl FnOnce() -> Result<V, BackendError>,
    ) -> Result<Arc<V>, BackendError> {
        let mut made = self.made.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(value) = made.get(&key) {
            return Ok(Arc::clone(value));
        }
        let value = Arc::new(make()?);
        made.insert(key, Arc::clone(&value));
        Ok(value)
    }
}
