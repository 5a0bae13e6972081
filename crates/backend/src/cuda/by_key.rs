//! Things made when first needed.

use std::{
    collections::HashMap,
    hash::Hash,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
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
    /// Threads may make things side by side; of two for the same key, all get the first.
    pub(super) fn get(
        &self,
        key: K,
        make: impl FnOnce() -> Result<V, BackendError>,
    ) -> Result<Arc<V>, BackendError> {
        if let Some(value) = self.lock().get(&key) {
            return Ok(Arc::clone(value));
        }
        let value = Arc::new(make()?);
        Ok(Arc::clone(self.lock().entry(key).or_insert(value)))
    }

    fn lock(&self) -> MutexGuard<'_, HashMap<K, Arc<V>>> {
        self.made.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(test)]
mod tests {
    use std::{sync::Barrier, thread};

    use super::*;

    #[test]
    fn what_is_made_side_by_side_is_kept_once() {
        let things = ByKey::default();
        // Both are being made before either is done.
        let barrier = Barrier::new(2);
        let get = |key: u32, value: u32| {
            things.get(key, || {
                barrier.wait();
                Ok(value)
            })
        };
        for (first, second, num_made) in [(1, 1, 1), (2, 3, 3)] {
            let made = thread::scope(|scope| {
                let threads = [(first, 10), (second, 20)]
                    .map(|(key, value)| scope.spawn(move || get(key, value).unwrap()));
                threads.map(|thread| thread.join().unwrap())
            });
            assert_eq!(Arc::ptr_eq(&made[0], &made[1]), first == second);
            assert_eq!(things.lock().len(), num_made);
        }
        let failed = things.get(4, || Err(BackendError::Unsupported("no".into())));
        assert!(failed.is_err());
        assert_eq!(*things.get(4, || Ok(40)).unwrap(), 40);
        assert_eq!(*things.get(4, || Ok(50)).unwrap(), 40);
    }
}
