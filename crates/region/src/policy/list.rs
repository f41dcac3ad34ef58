//! A list of pages in which each page occurs at most once.

const NONE: u32 = u32::MAX;

/// A doubly linked list over page numbers, of eight bytes a page of the region.
#[derive(Debug)]
pub(super) struct List {
    /// For each page, the previous and the next page. The last entry is the root, with the last and
    /// the first page of the list.
    links: Vec<[u32; 2]>,
}

impl List {
    pub(super) fn new(pages: u64) -> Self {
        let root = u32::try_from(pages).expect("a region has fewer than 2^32 pages");
        let mut links = vec![[NONE; 2]; pages as usize];
        links.push([root; 2]);
        Self { links }
    }

    fn root(&self) -> u32 {
        (self.links.len() - 1) as u32
    }

    fn page(&self, at: u32) -> Option<u64> {
        (at != self.root()).then_some(u64::from(at))
    }

    pub(super) fn first(&self) -> Option<u64> {
        self.after(self.root().into())
    }

    /// Returns the next page.
    pub(super) fn after(&self, page: u64) -> Option<u64> {
        self.page(self.links[page as usize][1])
    }

    pub(super) fn has(&self, page: u64) -> bool {
        self.links[page as usize][1] != NONE
    }

    /// Appends a page that is not in the list; otherwise does nothing.
    pub(super) fn push(&mut self, page: u64) {
        let root = self.root();
        self.insert_before(page, root.into());
    }

    /// Inserts a page that is not in the list before another; otherwise does nothing.
    pub(super) fn insert_before(&mut self, page: u64, next: u64) {
        if self.has(page) {
            return;
        }
        let before = self.links[next as usize][0];
        self.links[page as usize] = [before, next as u32];
        self.links[before as usize][1] = page as u32;
        self.links[next as usize][0] = page as u32;
    }

    /// Removes a page, if it is in the list.
    pub(super) fn remove(&mut self, page: u64) {
        if !self.has(page) {
            return;
        }
        let [before, after] = std::mem::replace(&mut self.links[page as usize], [NONE; 2]);
        self.links[before as usize][1] = after;
        self.links[after as usize][0] = before;
    }
}
