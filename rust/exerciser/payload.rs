// SPDX-License-Identifier: GPL-2.0

//! What is sent, such that the other side can tell whether it got just that.

#![forbid(unsafe_code)]

/// The bytes of the header: pair, slot and round, each from its least byte to its most.
const HEADER: usize = 16;

/// The shortest message.
pub(crate) const MIN_SIZE: i64 = HEADER as i64;

/// Which message it is.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) struct Id {
    /// The pair of queue pairs.
    pub(crate) pair: u32,
    /// The place, among those that may be in flight, that the message has.
    pub(crate) slot: u32,
    /// How many messages had that place before.
    pub(crate) round: u64,
}

impl Id {
    /// Fills `data` with the message.
    pub(crate) fn write(self, data: &mut [u8]) {
        let Some((header, body)) = data.split_first_chunk_mut::<HEADER>() else {
            return;
        };
        *header = self.header();
        let mut words = Words::new(self);
        let mut chunks = body.chunks_exact_mut(8);
        for chunk in &mut chunks {
            chunk.copy_from_slice(&words.next_word());
        }
        let tail = chunks.into_remainder();
        if !tail.is_empty() {
            words.write_tail(tail);
        }
    }

    /// Reads which message `data` holds, if it holds one whole.
    pub(crate) fn read(data: &[u8]) -> Option<Self> {
        let (header, body) = data.split_first_chunk::<HEADER>()?;
        let (pair, rest) = header.split_first_chunk()?;
        let (slot, rest) = rest.split_first_chunk()?;
        let (round, _) = rest.split_first_chunk()?;
        let id = Self {
            pair: u32::from_le_bytes(*pair),
            slot: u32::from_le_bytes(*slot),
            round: u64::from_le_bytes(*round),
        };

        let mut words = Words::new(id);
        let chunks = body.chunks_exact(8);
        let tail = chunks.remainder();
        for chunk in chunks {
            if chunk != words.next_word() {
                return None;
            }
        }
        let whole = tail.is_empty() || words.next_word().starts_with(tail);
        whole.then_some(id)
    }

    fn header(self) -> [u8; HEADER] {
        // As one number: two moves.
        let place = u128::from(self.slot) << 32 | u128::from(self.pair);
        (u128::from(self.round) << 64 | place).to_le_bytes()
    }
}

/// The words of a message's body, which differ from each other and from those of any other message.
struct Words(u64);

impl Words {
    fn new(id: Id) -> Self {
        let place = u64::from(id.pair) << 32 | u64::from(id.slot);
        Self(place.wrapping_mul(0x9e37_79b9_7f4a_7c15) ^ id.round.rotate_left(17))
    }

    /// Fills what is no whole word. It is out of the way of messages that have none.
    #[inline(never)]
    fn write_tail(mut self, tail: &mut [u8]) {
        for (byte, word) in tail.iter_mut().zip(self.next_word()) {
            *byte = word;
        }
    }

    fn next_word(&mut self) -> [u8; 8] {
        // A step of xorshift64*; zero, its one fixed point, is stepped over.
        let mut x = self.0.max(1);
        x ^= x >> 12;
        x ^= x << 25;
        x ^= x >> 27;
        self.0 = x;
        x.wrapping_mul(0x2545_f491_4f6c_dd1d).to_ne_bytes()
    }
}
