//! Objects that outlive the process: one JSON file each, all of them in memory as well.

use std::collections::BTreeMap;
use std::fs::{self, File};
use std::io::{self, Write};
use std::path::PathBuf;
use std::sync::{Mutex, MutexGuard, PoisonError};

use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};

/// An object, and whose it is.
#[derive(Clone, Debug, Deserialize, Serialize)]
pub(crate) struct Record<T> {
    /// Grows with every object that is made.
    pub(crate) number: u64,
    /// Who may see it; `None`: everybody.
    pub(crate) owner: Option<String>,
    pub(crate) object: T,
}

/// All objects of one kind, by id.
pub(crate) struct Records<T> {
    folder: PathBuf,
    all: Mutex<BTreeMap<String, Record<T>>>,
}

impl<T: Clone + DeserializeOwned + Serialize> Records<T> {
    /// Reads what is there. What is no record is left alone, with a line in the log.
    ///
    /// # Errors
    /// The folder cannot be made or read.
    pub(crate) fn open(folder: PathBuf) -> io::Result<Self> {
        fs::create_dir_all(&folder)?;
        let mut all = BTreeMap::new();
        for entry in fs::read_dir(&folder)? {
            let path = entry?.path();
            if path.extension().is_none_or(|extension| extension != "json") {
                continue;
            }
            let Some(id) = path.file_stem().and_then(|stem| stem.to_str()) else { continue };
            let read = fs::read(&path).and_then(|bytes| Ok(serde_json::from_slice(&bytes)?));
            match read {
                Ok(record) => drop(all.insert(id.to_owned(), record)),
                Err(error) => tracing::error!(path = %path.display(), %error, "no record"),
            }
        }
        Ok(Self { folder, all: Mutex::new(all) })
    }

    pub(crate) fn len(&self) -> usize {
        self.all().len()
    }

    /// How many there are, and the sum of what `part` says of each.
    pub(crate) fn sum(&self, part: impl Fn(&T) -> u64) -> (usize, u64) {
        let all = self.all();
        (all.len(), all.values().map(|record| part(&record.object)).sum())
    }

    /// An object that `owner` may see.
    pub(crate) fn get(&self, id: &str, owner: Option<&str>) -> Option<Record<T>> {
        self.all().get(id).filter(|record| record.owner.as_deref() == owner).cloned()
    }

    /// All that `keeps` keeps, the oldest first.
    pub(crate) fn select(&self, keeps: impl Fn(&Record<T>) -> bool) -> Vec<Record<T>> {
        let mut kept: Vec<_> =
            self.all().values().filter(|record| keeps(record)).cloned().collect();
        kept.sort_by_key(|record| record.number);
        kept
    }

    /// Keeps an object; one of the same id makes way.
    ///
    /// # Errors
    /// It cannot be written.
    pub(crate) fn put(&self, id: &str, owner: Option<String>, object: T) -> io::Result<Record<T>> {
        let mut all = self.all();
        let next = all.values().map(|record| record.number + 1).max().unwrap_or(0);
        let number = all.get(id).map_or(next, |record| record.number);
        let record = Record { number, owner, object };
        self.write(id, &record)?;
        all.insert(id.to_owned(), record.clone());
        Ok(record)
    }

    /// Changes an object; `None`: it is not there.
    ///
    /// # Errors
    /// It cannot be written; it stays as it was.
    pub(crate) fn change(
        &self,
        id: &str,
        change: impl FnOnce(&mut T),
    ) -> io::Result<Option<Record<T>>> {
        let mut all = self.all();
        let Some(record) = all.get_mut(id) else { return Ok(None) };
        let mut changed = record.clone();
        change(&mut changed.object);
        self.write(id, &changed)?;
        *record = changed.clone();
        Ok(Some(changed))
    }

    /// Forgets an object.
    ///
    /// # Errors
    /// Its file cannot be removed.
    pub(crate) fn remove(&self, id: &str) -> io::Result<()> {
        let mut all = self.all();
        match fs::remove_file(self.path(id)) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error),
            _ => all.remove(id),
        };
        Ok(())
    }

    /// Whole, or not at all: first beside the old one, then in its place.
    fn write(&self, id: &str, record: &Record<T>) -> io::Result<()> {
        let beside = self.folder.join(format!("{id}.new"));
        let mut file = File::create(&beside)?;
        file.write_all(&serde_json::to_vec(record)?)?;
        file.sync_data()?;
        fs::rename(beside, self.path(id))
    }

    fn path(&self, id: &str) -> PathBuf {
        self.folder.join(format!("{id}.json"))
    }

    fn all(&self) -> MutexGuard<'_, BTreeMap<String, Record<T>>> {
        self.all.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn records_are_there_again() {
        let name = format!("inflight-records-{}", std::process::id());
        let folder = std::env::temp_dir().join(name);
        let records = Records::<String>::open(folder.clone()).unwrap();
        records.put("b", None, "1".to_owned()).unwrap();
        records.put("a", Some("ann".to_owned()), "2".to_owned()).unwrap();
        records.put("c", None, "3".to_owned()).unwrap();
        records.remove("c").unwrap();
        records.change("b", |object| object.push('!')).unwrap().unwrap();
        assert!(records.change("c", |_| {}).unwrap().is_none());
        // As a process leaves them that is killed while it writes, and others that are not ours.
        fs::write(folder.join("b.new"), "{").unwrap();
        fs::write(folder.join("d.json"), "{").unwrap();

        let again = Records::<String>::open(folder.clone()).unwrap();
        let objects: Vec<_> = again.select(|_| true).into_iter().map(|it| it.object).collect();
        assert_eq!(objects, ["1!", "2"], "the oldest first");
        assert!(again.get("a", None).is_none() && again.get("a", Some("bob")).is_none());
        assert_eq!(again.get("a", Some("ann")).unwrap().object, "2");
        assert_eq!(again.len(), 2);
        fs::remove_dir_all(folder).unwrap();
    }
}
