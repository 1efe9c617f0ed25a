// SPDX-License-Identifier: GPL-2.0

//! Enumerations of the kernel's, which a device or a later kernel may have more values of.

/// Makes an enumeration of one of the kernel's, with a variant for numbers that it doesn't have.
macro_rules! numbers {
    (
        $(#[$doc:meta])* $enum:ident: $raw:ident;
        $($(#[$variant_doc:meta])* $variant:ident = $value:ident,)*
    ) => {
        $(#[$doc])*
        #[derive(Clone, Copy, PartialEq, Eq, Debug)]
        pub enum $enum {
            $(
                $(#[$variant_doc])*
                #[doc = concat!("C constant: `", stringify!($value), "`.")]
                $variant,
            )*
            /// Any other number, such as one of a later kernel.
            Unknown(u32),
        }

        impl From<u32> for $enum {
            fn from(raw: u32) -> Self {
                kernel::macros::paste! {
                    match raw {
                        $(bindings::[<$raw _ $value>] => Self::$variant,)*
                        other => Self::Unknown(other),
                    }
                }
            }
        }

        impl $enum {
            /// The number that the C side has for it.
            pub fn raw(self) -> u32 {
                kernel::macros::paste! {
                    match self {
                        $(Self::$variant => bindings::[<$raw _ $value>],)*
                        Self::Unknown(other) => other,
                    }
                }
            }
        }
    };
}
