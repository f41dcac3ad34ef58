//! A borrower's volumes: extents over leases of one or several lenders.
