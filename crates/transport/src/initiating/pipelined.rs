//! Operations over a connection, many in flight.

use std::array;
use std::fmt;
use std::time::Duration;

use super::late::{Late, LateRead};
use super::operation::round_length;
use super::{Deadline, Failed, Failure, Interrupted, Operation, Round, WINDOW};

/// A protocol's connection that carries out operations in rounds: the requests of a round leave
/// together, and their answers come in any order. A protocol says how; the rest is the same for
/// all.
pub trait Pipelined {
    /// The other end, with its means of access.
    type Target: fmt::Debug + fmt::Display;
    /// The protocol's failures.
    type Failure: Failure;

    /// Returns how many requests may be in flight, at most [`WINDOW`].
    fn window(&self) -> usize {
        WINDOW
    }

    /// Returns the timeout of an operation.
    fn io_timeout(&self) -> Duration;

    /// Returns whether an earlier failure ended the connection.
    fn is_broken(&self) -> bool;

    /// Adds the target to the failure. Marks the connection as broken if the failure ends it.
    fn fail(&mut self, failure: Self::Failure) -> Failed<Self::Target, Self::Failure>;

    /// Checks that the peer can be asked for the operation.
    ///
    /// # Errors
    /// If the operation exceeds what the peer offers.
    fn check(&self, operation: &Operation<'_>) -> Result<(), Self::Failure>;

    /// Returns the number of a round's first request, with room for [`WINDOW`] numbers.
    ///
    /// # Errors
    /// If there is input already: it would answer no request.
    fn begin(&mut self, deadline: Deadline) -> Result<u64, Self::Failure>;

    /// Sends the requests of all operations that are not empty.
    ///
    /// # Errors
    /// The failure that ends the connection.
    fn send(
        &mut self,
        operations: &[Operation<'_>],
        round: &mut Round<Self::Failure>,
        deadline: Deadline,
    ) -> Result<(), Self::Failure>;

    /// Receives one answer, or a part of one, and enters it in the round.
    ///
    /// # Errors
    /// The failure that ends the connection; any other goes to [`Round::fail`].
    fn receive_one(
        &mut self,
        operations: &mut [Operation<'_>],
        round: &mut Round<Self::Failure>,
        deadline: Deadline,
    ) -> Result<(), Self::Failure>;

    /// Waits until some input is here. Returns false at the deadline.
    ///
    /// # Errors
    /// The failure that ends the connection.
    fn wait_for_input(&mut self, deadline: Deadline) -> Result<bool, Self::Failure>;

    /// Returns the read whose caller does not wait for the answer any longer.
    fn late(&mut self) -> &mut Late<Self::Failure>;

    /// Reads up to a page, if its answer begins to arrive within the time `soon`. Otherwise it
    /// returns false, and the caller may take the page from elsewhere. The next operation receives
    /// the late answer first, and drops it.
    ///
    /// # Errors
    /// As [`run_by`](Self::run_by); the content of `into` is then unspecified.
    fn read_page_soon(
        &mut self,
        offset: u64,
        into: &mut [u8],
        soon: Duration,
    ) -> Result<bool, Failed<Self::Target, Self::Failure>> {
        let deadline = Deadline::after(self.io_timeout());
        if into.is_empty()
            || !Late::<Self::Failure>::has_room(into.len())
            || soon >= self.io_timeout()
        {
            return self.run_by(deadline, &mut [Operation::Read { offset, into }]).map(|()| true);
        }
        try_read_soon(self, offset, into, (Deadline::after(soon), deadline))
            .map_err(|failure| self.fail(failure))
    }

    /// Carries out all operations in any order.
    ///
    /// # Errors
    /// The first failure found; which of the other operations took effect is then unspecified.
    fn run_by(
        &mut self,
        deadline: Deadline,
        operations: &mut [Operation<'_>],
    ) -> Result<(), Failed<Self::Target, Self::Failure>> {
        try_run(self, deadline, operations, None).map_err(|failure| self.fail(failure))
    }

    /// As [`run_by`](Self::run_by), and calls `meanwhile` each time that requests have left, while
    /// the peer works on them. Its time does not count.
    ///
    /// # Errors
    /// As [`run_by`](Self::run_by).
    fn run_while(
        &mut self,
        operations: &mut [Operation<'_>],
        meanwhile: Option<&mut dyn FnMut()>,
    ) -> Result<(), Failed<Self::Target, Self::Failure>> {
        let deadline = Deadline::after(self.io_timeout());
        try_run(self, deadline, operations, meanwhile).map_err(|failure| self.fail(failure))
    }

    /// Carries out all operations. A single operation takes a short path, as every page comes this
    /// way.
    ///
    /// # Errors
    /// As [`run_by`](Self::run_by).
    fn run_all<'a>(
        &mut self,
        mut pieces: impl Iterator<Item = Operation<'a>>,
    ) -> Result<(), Failed<Self::Target, Self::Failure>> {
        let deadline = Deadline::after(self.io_timeout());
        while let Some(first) = pieces.next() {
            let Some(second) = pieces.next() else { return self.run_by(deadline, &mut [first]) };
            let mut more = [first, second].into_iter().chain(&mut pieces);
            let mut count = 0;
            let mut operations: [Operation<'_>; WINDOW] = array::from_fn(|_| match more.next() {
                Some(operation) => {
                    count += 1;
                    operation
                }
                None => Operation::Flush,
            });
            self.run_by(deadline, &mut operations[..count])?;
        }
        Ok(())
    }

    /// Reads all of `into` in pieces of at most `longest` bytes.
    ///
    /// # Errors
    /// As [`run_by`](Self::run_by); the content of `into` is then unspecified.
    fn read_in_pieces(
        &mut self,
        offset: u64,
        into: &mut [u8],
        longest: usize,
    ) -> Result<(), Failed<Self::Target, Self::Failure>> {
        let pieces = into.chunks_mut(longest).zip((offset..).step_by(longest));
        self.run_all(pieces.map(|(into, offset)| Operation::Read { offset, into }))
    }

    /// Writes all of `from` in pieces of at most `longest` bytes.
    ///
    /// # Errors
    /// As [`run_by`](Self::run_by); any part of the data may then have been written.
    fn write_in_pieces(
        &mut self,
        offset: u64,
        from: &[u8],
        longest: usize,
    ) -> Result<(), Failed<Self::Target, Self::Failure>> {
        let pieces = from.chunks(longest).zip((offset..).step_by(longest));
        self.run_all(pieces.map(|(from, offset)| Operation::Write { offset, from }))
    }
}

fn try_run<C: Pipelined + ?Sized>(
    connection: &mut C,
    mut deadline: Deadline,
    mut operations: &mut [Operation<'_>],
    mut meanwhile: Option<&mut dyn FnMut()>,
) -> Result<(), C::Failure> {
    if connection.is_broken() {
        return Err(C::Failure::BROKEN);
    }
    operations.iter().try_for_each(|operation| connection.check(operation))?;
    if !receive_late(connection, deadline, deadline)? {
        return Err(Interrupted::Silent(connection.io_timeout()).into());
    }
    let most = connection.window();
    while !operations.is_empty() {
        let (now, rest) = operations.split_at_mut(round_length(operations, most));
        one_round(connection, &mut deadline, now, &mut meanwhile)?;
        operations = rest;
    }
    Ok(())
}

/// Sends the requests and receives all answers, also after a failed one, so that the connection
/// stays usable.
fn one_round<C: Pipelined + ?Sized>(
    connection: &mut C,
    deadline: &mut Deadline,
    operations: &mut [Operation<'_>],
    meanwhile: &mut Option<&mut dyn FnMut()>,
) -> Result<(), C::Failure> {
    let mut round = Round::new(connection.begin(*deadline)?, operations);
    connection.send(operations, &mut round, *deadline)?;
    if let Some(meanwhile) = meanwhile {
        meanwhile();
        *deadline = Deadline::after(connection.io_timeout());
    }
    while !round.is_over() {
        connection.receive_one(operations, &mut round, *deadline)?;
    }
    round.result()
}

/// Reads as [`Pipelined::read_page_soon`] does. `soon` is the time for the answer to begin, and
/// `deadline` that for its end.
fn try_read_soon<C: Pipelined + ?Sized>(
    connection: &mut C,
    offset: u64,
    into: &mut [u8],
    (soon, deadline): (Deadline, Deadline),
) -> Result<bool, C::Failure> {
    if connection.is_broken() {
        return Err(C::Failure::BROKEN);
    }
    let length = into.len();
    let mut read = [Operation::Read { offset, into }];
    connection.check(&read[0])?;
    if !receive_late(connection, soon, deadline)? {
        return Ok(false);
    }
    let mut round = Round::new(connection.begin(deadline)?, &read);
    connection.send(&read, &mut round, deadline)?;
    if !connection.wait_for_input(soon)? {
        connection.late().expect(LateRead { round, offset, length, deadline });
        return Ok(false);
    }
    while !round.is_over() {
        connection.receive_one(&mut read, &mut round, deadline)?;
    }
    round.result().map(|()| true)
}

/// Receives the late answer, if there is one. Returns false if it does not begin to arrive `soon`.
fn receive_late<C: Pipelined + ?Sized>(
    connection: &mut C,
    soon: Deadline,
    deadline: Deadline,
) -> Result<bool, C::Failure> {
    let Some(end) = connection.late().deadline() else { return Ok(true) };
    if !connection.wait_for_input(soon)? {
        end.check()?;
        return Ok(false);
    }
    let Some((mut read, mut room)) = connection.late().take() else { return Ok(true) };
    let mut again = [read.again(&mut room)];
    while !read.round.is_over() {
        connection.receive_one(&mut again, &mut read.round, deadline)?;
    }
    connection.late().put_back(room);
    Ok(true)
}
