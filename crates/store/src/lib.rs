//! A lender's RAM: sparse, elastic, accounted.
