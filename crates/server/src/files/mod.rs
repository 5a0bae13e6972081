//! Files that clients leave here, and those that batches make: `/v1/files`.
//!
//! Reading order: [`records`] (objects that outlive the process), [`page`] (lists of them, in
//! pieces), [`object`] (what a file is to clients), [`store`] (where they lie), [`upload`] and
//! [`endpoints`].
//!
//! ```text
//! DIR/files/ID.json    what a file is       DIR/batches/ID.json    what a batch is
//! DIR/data/ID          what it holds        DIR/data/ID            answers, while it runs
//! DIR/parts/ID         what has arrived of it so far
//! ```
//!
//! Invariant: a file is there whole or not at all, whenever the process ends.
//! Invariant: nobody sees what another key has left.

pub(crate) mod endpoints;
pub(crate) mod object;
pub(crate) mod page;
mod records;
mod store;
pub(crate) mod upload;

pub(crate) use object::FileObject;
pub(crate) use records::Record;
pub use store::{FileStore, FilesError};
