//! A file of KV blocks that survives restarts.
//!
//! ```text
//!   header   magic, what the blocks are of, bytes of a block, checksum        4096 bytes
//!   slot 0   name, stamp, checksum of the block, checksum of this   64 bytes
//!            the block
//!   slot 1   ..                                       each slot a multiple of 4096 bytes
//! ```
//!
//! Nothing is synced while the engine runs: the system writes when it likes. After a power loss a
//! slot may be old, torn or missing; its checksums tell, and what they tell against is dropped.
//! When the engine ends in order, the file is synced.
//!
//! Invariant: a block is given only if its name, its checksum and the header fit.

use std::collections::{BTreeMap, HashMap};
use std::fs::{File, OpenOptions, TryLockError};
use std::io::{self, Read, Seek, SeekFrom, Write};
use std::path::PathBuf;

use inflight_kv_cache::BlockName;
use sha2::{Digest, Sha256};

use crate::EngineError;

const MAGIC: &[u8; 16] = b"inflight KV 1\n\0\0";
const PAGE: u64 = 4096;
const SLOT_HEADER: usize = 64;

/// Where the file is and what its blocks depend on.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CacheFileOptions {
    /// The file; it is made if it is not there.
    pub path: PathBuf,
    /// Most bytes that it may have.
    pub max_bytes: u64,
    /// All that a block's numbers depend on besides tokens: model, weights, arithmetic, types,
    /// sizes. A file of anything else is emptied.
    pub content: String,
}

/// The file, open and locked.
#[derive(Debug)]
pub(crate) struct CacheFile {
    file: File,
    path: PathBuf,
    block_bytes: usize,
    num_slots: usize,
    by_name: HashMap<BlockName, Slot>,
    /// Slots in use by their stamps: the least recently used first.
    by_stamp: BTreeMap<u64, BlockName>,
    /// Slots that hold nothing.
    free: Vec<usize>,
    next_stamp: u64,
}

#[derive(Clone, Copy, Debug)]
struct Slot {
    index: usize,
    stamp: u64,
    checksum: u32,
}

impl CacheFile {
    /// Opens the file and reads what it has, or makes it.
    ///
    /// # Errors
    /// When it cannot be opened, is another program's, is in use, or has no room for a block.
    pub(crate) fn open(
        options: &CacheFileOptions,
        block_bytes: usize,
    ) -> Result<Self, EngineError> {
        let fail = |reason: String| EngineError::CacheFile { path: options.path.clone(), reason };
        let mut file = OpenOptions::new()
            .read(true)
            .write(true)
            .create(true)
            .truncate(false)
            .open(&options.path)
            .map_err(|error| fail(error.to_string()))?;
        match file.try_lock() {
            Ok(()) => {}
            Err(TryLockError::WouldBlock) => return Err(fail("another engine uses it".to_owned())),
            Err(TryLockError::Error(error)) => return Err(fail(error.to_string())),
        }
        let room = options.max_bytes.saturating_sub(PAGE) / slot_bytes(block_bytes);
        let num_slots = usize::try_from(room).unwrap_or(usize::MAX);
        if num_slots == 0 {
            let reason = format!("{} bytes have no room for a block", options.max_bytes);
            return Err(fail(reason));
        }
        let is_ours = claim(&mut file, options, block_bytes).map_err(|e| fail(e.to_string()))?;
        if !is_ours {
            return Err(fail("it is not empty and was not made by inflight".to_owned()));
        }
        let mut opened = Self {
            file,
            path: options.path.clone(),
            block_bytes,
            num_slots,
            by_name: HashMap::new(),
            by_stamp: BTreeMap::new(),
            free: Vec::new(),
            next_stamp: 0,
        };
        opened.scan().map_err(|error| fail(error.to_string()))?;
        Ok(opened)
    }

    /// Reads the slots' headers.
    fn scan(&mut self) -> io::Result<()> {
        let length = self.file.metadata()?.len();
        let stride = slot_bytes(self.block_bytes);
        self.file.set_len(length.min(PAGE + self.num_slots as u64 * stride))?;
        // The last slot ends with its block.
        let num_there = length.saturating_sub(PAGE).div_ceil(stride);
        let num_there = num_there.min(self.num_slots as u64) as usize;
        let mut num_bad = 0;
        for index in 0..num_there {
            let mut header = [0; SLOT_HEADER];
            self.file.seek(SeekFrom::Start(self.place(index)))?;
            let is_there = self.file.read_exact(&mut header).is_ok();
            match parse_slot(&header).filter(|_| is_there) {
                Some((name, stamp, checksum)) if !self.by_stamp.contains_key(&stamp) => {
                    self.next_stamp = self.next_stamp.max(stamp + 1);
                    self.by_stamp.insert(stamp, name);
                    let slot = Slot { index, stamp, checksum };
                    if let Some(double) = self.by_name.insert(name, slot) {
                        self.by_stamp.remove(&double.stamp);
                        self.free.push(double.index);
                    }
                }
                _ => {
                    num_bad += usize::from(header.iter().any(|&byte| byte != 0));
                    self.free.push(index);
                }
            }
        }
        self.free.extend(num_there..self.num_slots);
        self.free.sort_unstable_by(|a, b| b.cmp(a));
        if num_bad > 0 {
            tracing::warn!(path = %self.path.display(), num_bad, "bad blocks were dropped");
        }
        Ok(())
    }

    fn place(&self, index: usize) -> u64 {
        PAGE + index as u64 * slot_bytes(self.block_bytes)
    }

    /// What the file has.
    pub(crate) fn names(&self) -> impl Iterator<Item = BlockName> {
        self.by_name.keys().copied()
    }

    /// Reads a block; `None` when the file does not have it, or when it is bad: then it is dropped.
    pub(crate) fn read(&mut self, name: &BlockName) -> Option<Vec<u32>> {
        let slot = *self.by_name.get(name)?;
        let mut bytes = vec![0; SLOT_HEADER + self.block_bytes];
        let place = self.place(slot.index);
        let read = self.file.seek(SeekFrom::Start(place));
        let read = read.and_then(|_| self.file.read_exact(&mut bytes));
        let (header, block) = bytes.split_at(SLOT_HEADER);
        let is_named = parse_slot(header).is_some_and(|(found, ..)| found == *name);
        if read.is_err() || !is_named || crc32fast::hash(block) != slot.checksum {
            let path = self.path.display();
            tracing::warn!(%path, slot = slot.index, ?read, "a bad block was dropped");
            self.drop_slot(name);
            return None;
        }
        let stamp = self.take_stamp();
        self.by_stamp.remove(&slot.stamp);
        self.by_stamp.insert(stamp, *name);
        self.by_name.insert(*name, Slot { stamp, ..slot });
        let words = block.chunks_exact(4);
        Some(words.map(|word| u32::from_le_bytes([word[0], word[1], word[2], word[3]])).collect())
    }

    /// Forgets the least recently used block if the file is full, and gives its name.
    pub(crate) fn make_room(&mut self) -> Option<BlockName> {
        let (_, &oldest) = self.by_stamp.first_key_value().filter(|_| self.free.is_empty())?;
        self.drop_slot(&oldest);
        Some(oldest)
    }

    /// Writes a block that the file does not have.
    ///
    /// # Errors
    /// The system's. The block is not in the file then.
    ///
    /// # Panics
    /// When there is no room.
    pub(crate) fn write(&mut self, name: BlockName, words: &[u32]) -> io::Result<()> {
        if self.by_name.contains_key(&name) {
            return Ok(());
        }
        let index = self.free.pop().expect("room was made before");
        let stamp = self.take_stamp();
        let mut bytes = vec![0; SLOT_HEADER];
        bytes.extend(words.iter().flat_map(|word| word.to_le_bytes()));
        let checksum = crc32fast::hash(&bytes[SLOT_HEADER..]);
        bytes[..SLOT_HEADER].copy_from_slice(&slot_header(&name, stamp, checksum));
        let place = self.place(index);
        let written = self.file.seek(SeekFrom::Start(place));
        if let Err(error) = written.and_then(|_| self.file.write_all(&bytes)) {
            self.free.push(index);
            return Err(error);
        }
        self.by_stamp.insert(stamp, name);
        self.by_name.insert(name, Slot { index, stamp, checksum });
        Ok(())
    }

    fn drop_slot(&mut self, name: &BlockName) {
        if let Some(slot) = self.by_name.remove(name) {
            self.by_stamp.remove(&slot.stamp);
            self.free.push(slot.index);
        }
    }

    fn take_stamp(&mut self) -> u64 {
        self.next_stamp += 1;
        self.next_stamp - 1
    }

    /// Has the system write all that it has not written yet.
    pub(crate) fn sync(&self) -> io::Result<()> {
        self.file.sync_data()
    }
}

/// Makes the file this content's, emptying it if it was another's; false if it is not ours.
fn claim(file: &mut File, options: &CacheFileOptions, block_bytes: usize) -> io::Result<bool> {
    let mut expected = MAGIC.to_vec();
    expected.extend(Sha256::digest(options.content.as_bytes()));
    expected.extend((block_bytes as u64).to_le_bytes());
    let checksum = crc32fast::hash(&expected);
    expected.extend(checksum.to_le_bytes());
    let mut found = vec![0; expected.len()];
    file.seek(SeekFrom::Start(0))?;
    let length = file.metadata()?.len();
    let is_whole = length >= PAGE && file.read_exact(&mut found).is_ok();
    if is_whole && found == expected {
        return Ok(true);
    }
    if length > 0 && !(is_whole && found.starts_with(MAGIC)) {
        return Ok(false);
    }
    if length > 0 {
        let path = options.path.display();
        tracing::warn!(%path, "the cache file was of another model or arithmetic: it is emptied");
    }
    file.set_len(0)?;
    expected.resize(PAGE as usize, 0);
    file.seek(SeekFrom::Start(0))?;
    file.write_all(&expected)?;
    Ok(true)
}

fn slot_bytes(block_bytes: usize) -> u64 {
    ((SLOT_HEADER + block_bytes) as u64).next_multiple_of(PAGE)
}

fn slot_header(name: &BlockName, stamp: u64, checksum: u32) -> [u8; SLOT_HEADER] {
    let mut header = [0; SLOT_HEADER];
    header[..32].copy_from_slice(&name.0);
    header[32..40].copy_from_slice(&stamp.to_le_bytes());
    header[40..44].copy_from_slice(&checksum.to_le_bytes());
    let own = crc32fast::hash(&header[..44]);
    header[44..48].copy_from_slice(&own.to_le_bytes());
    header
}

/// Name, stamp and the block's checksum, if the header is whole.
fn parse_slot(header: &[u8]) -> Option<(BlockName, u64, u32)> {
    let own = u32::from_le_bytes(header[44..48].try_into().ok()?);
    if header[..44].iter().all(|&byte| byte == 0) || crc32fast::hash(&header[..44]) != own {
        return None;
    }
    let stamp = u64::from_le_bytes(header[32..40].try_into().ok()?);
    let checksum = u32::from_le_bytes(header[40..44].try_into().ok()?);
    Some((BlockName(header[..32].try_into().ok()?), stamp, checksum)).filter(|_| stamp < u64::MAX)
}

/// The path of a file for a test, gone when the test ends.
#[cfg(test)]
struct TestPath(PathBuf);

#[cfg(test)]
impl TestPath {
    fn new(name: &str) -> Self {
        let path = std::env::temp_dir().join(format!("inflight-{}-{name}", std::process::id()));
        let _ = std::fs::remove_file(&path);
        Self(path)
    }
}

#[cfg(test)]
impl Drop for TestPath {
    fn drop(&mut self) {
        let _ = std::fs::remove_file(&self.0);
    }
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use super::*;

    const BYTES: usize = 8000;

    fn name(byte: u8) -> BlockName {
        BlockName([byte; 32])
    }

    fn block(byte: u8) -> Vec<u32> {
        (0..BYTES as u32 / 4).map(|i| i * 7 + u32::from(byte)).collect()
    }

    fn options(path: &Path, num_slots: u64) -> CacheFileOptions {
        let max_bytes = PAGE + num_slots * 8192;
        CacheFileOptions { path: path.to_owned(), max_bytes, content: "a model".to_owned() }
    }

    fn open(path: &Path, num_slots: u64) -> CacheFile {
        CacheFile::open(&options(path, num_slots), BYTES).unwrap()
    }

    #[test]
    fn blocks_survive_and_the_least_recently_used_gives_way() {
        let path = TestPath::new("survive");
        let mut file = open(&path.0, 3);
        for byte in [1, 2, 3] {
            assert_eq!(file.make_room(), None);
            file.write(name(byte), &block(byte)).unwrap();
        }
        assert_eq!(file.read(&name(1)), Some(block(1)));
        assert_eq!(file.make_room(), Some(name(2)));
        file.write(name(4), &block(4)).unwrap();
        drop(file);
        assert_eq!(std::fs::metadata(&path.0).unwrap().len(), PAGE + 2 * 8192 + 64 + 8000);
        let mut file = open(&path.0, 3);
        let read = [1, 2, 3, 4].map(|byte| file.read(&name(byte)) == Some(block(byte)));
        assert_eq!(read, [true, false, true, true]);
        drop(file);
        // A smaller limit keeps what lies within it.
        let file = open(&path.0, 1);
        assert_eq!(file.names().collect::<Vec<_>>(), [name(1)]);
        assert!(std::fs::metadata(&path.0).unwrap().len() <= PAGE + 8192);
    }

    #[test]
    fn bad_blocks_are_dropped() {
        let path = TestPath::new("bad");
        let mut file = open(&path.0, 4);
        for byte in 1..=4 {
            file.write(name(byte), &block(byte)).unwrap();
        }
        drop(file);
        let mut bytes = std::fs::read(&path.0).unwrap();
        let slot = |index: usize| PAGE as usize + index * 8192;
        bytes[slot(0) + 5000] ^= 1; // a bit of the block
        bytes[slot(1) + 3] ^= 1; // a bit of the name
        bytes.truncate(slot(3) + 4000); // torn
        std::fs::write(&path.0, bytes).unwrap();
        let mut file = open(&path.0, 4);
        let read = [1, 2, 3, 4].map(|byte| file.read(&name(byte)).is_some());
        assert_eq!(read, [false, false, true, false]);
        assert_eq!(file.names().collect::<Vec<_>>(), [name(3)]);
        // Their places are used again.
        for byte in 5..=7 {
            assert_eq!(file.make_room(), None);
            file.write(name(byte), &block(byte)).unwrap();
            assert_eq!(file.read(&name(byte)), Some(block(byte)));
        }
    }

    #[test]
    fn files_of_others_are_told_apart() {
        let path = TestPath::new("others");
        open(&path.0, 2).write(name(1), &block(1)).unwrap();
        let other = CacheFileOptions { content: "another".to_owned(), ..options(&path.0, 2) };
        let in_use = open(&path.0, 2);
        let error = CacheFile::open(&other, BYTES).unwrap_err().to_string();
        assert!(error.contains("another engine uses it"), "{error}");
        drop(in_use);
        assert_eq!(CacheFile::open(&other, BYTES).unwrap().names().count(), 0, "emptied");
        std::fs::write(&path.0, "my diary").unwrap();
        let error = CacheFile::open(&other, BYTES).unwrap_err().to_string();
        assert!(error.contains("not made by inflight"), "{error}");
        assert_eq!(std::fs::read(&path.0).unwrap(), b"my diary");
        let small = CacheFileOptions { max_bytes: 5000, ..other };
        std::fs::write(&path.0, "").unwrap();
        let error = CacheFile::open(&small, BYTES).unwrap_err().to_string();
        assert!(error.contains("no room for a block"), "{error}");
    }
}
